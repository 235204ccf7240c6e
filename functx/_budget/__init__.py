"""What to recompute within a budget of bytes: `functx.plan` and ``remat(f, budget=)``.

A function is recorded as a chain of blocks (`op_trace`), the bytes and the work of each block are
measured (`block_costs`), a dynamic program finds the cheapest regions for any number of bytes
(`solver`), and the best plan whose measured peak fits is taken (`plan`).
"""

from functx._budget.plan import Plan as Plan
from functx._budget.plan import plan as plan
