"""Commands of the command line: crosscheck, memory and plans, and the state of things."""

from functx._command.crosscheck import add_crosscheck as add_crosscheck
from functx._command.doctor import add_doctor as add_doctor
from functx._command.measure import add_memory as add_memory
from functx._command.measure import add_plan as add_plan
