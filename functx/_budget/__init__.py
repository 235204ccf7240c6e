"""Choose what to recompute within a budget of bytes: `functx.plan` and ``remat(f, budget=)``.

A function is recorded as a chain of blocks (`op_trace`). The bytes and the work of each block are
measured (`block_costs`). A dynamic program finds the cheapest regions for any number of bytes
(`solver`), and `plan` takes the cheapest plan whose measured peak fits.
"""

from functx._budget.plan import Plan as Plan
from functx._budget.plan import plan as plan
