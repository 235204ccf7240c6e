"""Report what a pullback saves, under which names. The public names for memory: `functx.memory`.

- `residuals`: `saved_residuals` and its table.
- `argument_names`: names of the tensors among a function's arguments and captured variables.
- `plots`: plots of live bytes, and how tables are shown in notebooks.
"""

from functx._insight import plots as plots
from functx._insight.argument_names import labels as labels
from functx._insight.plots import Printed as Printed
from functx._insight.residuals import Residual as Residual
from functx._insight.residuals import Residuals as Residuals
from functx._insight.residuals import ShapeAndDtype as ShapeAndDtype
from functx._insight.residuals import print_saved_residuals as print_saved_residuals
from functx._insight.residuals import saved_residuals as saved_residuals
from functx._insight.residuals import undisturbed as undisturbed
