"""Commands of the command line: what they are about, memory and plans, and the state of things."""

from functx._command.doctor import add_doctor as add_doctor
from functx._command.measure import add_memory as add_memory
from functx._command.measure import add_plan as add_plan
from functx._command.target import CommandError as CommandError
from functx._command.target import add_options as add_options
from functx._command.target import found as found
from functx._command.target import literal as literal
from functx._command.target import status as status
from functx._command.target import write as write
