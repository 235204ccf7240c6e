"""The commands of ``functx`` on the command line. Each module adds the parser of its command."""

from functx._cli.crosscheck import add_crosscheck as add_crosscheck
from functx._cli.demo import add_demo as add_demo
from functx._cli.doctor import add_doctor as add_doctor
from functx._cli.measure import add_memory as add_memory
from functx._cli.measure import add_plan as add_plan
