"""The commands of the command line, except the demo, whose dependencies are optional (`demo`)."""

from functx._cli.crosscheck import add_crosscheck as add_crosscheck
from functx._cli.doctor import add_doctor as add_doctor
from functx._cli.measure import add_memory as add_memory
from functx._cli.measure import add_plan as add_plan
