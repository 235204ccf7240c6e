"""``crosscheck``: one function, two frameworks, the same answers at the same memory?"""

from functx.compat._crosscheck.crosschecks import crosscheck as crosscheck
from functx.compat._crosscheck.findings import Crosscheck as Crosscheck
