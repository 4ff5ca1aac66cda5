"""Functions made of ops: the graph holds the ops. Those whose first argument is `x` are methods of values, too."""

from rlx.ir.functions import activations as activations
from rlx.ir.functions import arrays as arrays
from rlx.ir.functions import control as control
from rlx.ir.functions import images as images
from rlx.ir.functions import indices as indices
from rlx.ir.functions import norms as norms
from rlx.ir.functions import recurrent as recurrent
from rlx.ir.functions import signal as signal
from rlx.ir.functions.activations import *  # noqa: F403
from rlx.ir.functions.arrays import *  # noqa: F403
from rlx.ir.functions.control import *  # noqa: F403
from rlx.ir.functions.images import *  # noqa: F403
from rlx.ir.functions.indices import *  # noqa: F403
from rlx.ir.functions.norms import *  # noqa: F403
from rlx.ir.functions.recurrent import *  # noqa: F403
from rlx.ir.functions.signal import *  # noqa: F403

__all__ = []
__all__ += activations.__all__
__all__ += arrays.__all__
__all__ += control.__all__
__all__ += images.__all__
__all__ += indices.__all__
__all__ += norms.__all__
__all__ += recurrent.__all__
__all__ += signal.__all__
