"""What a pullback saves, under which names; the public face of memory is `functx.memory`.

- `residuals`: `saved_residuals` and its table.
- `argument_names`: names of the tensors that a function is given or closes over.
- `plots`: tables on a terminal and plots of live bytes.
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
