"""``crosscheck``: one function, two frameworks, the same answers at the same memory?"""

from functx.compat._crosscheck.comparison import crosscheck as crosscheck
from functx.compat._crosscheck.report import Crosscheck as Crosscheck
