"""Checks of inputs, outputs and states that the sessions of all backends share, so that all backends raise the same errors.

`ShapeCheck` remembers shapes that passed the check, so the check is fast for calls with the same shapes.
"""

from .feeds import ShapeCheck as ShapeCheck
from .feeds import check_buffer_shape as check_buffer_shape
from .feeds import check_buffers as check_buffers
from .feeds import check_fits as check_fits
from .feeds import check_readable as check_readable
from .feeds import read_feeds as read_feeds
from .feeds import session_closed as session_closed
from .feeds import tensor_dtypes as tensor_dtypes
from .feeds import wanted_outputs as wanted_outputs
from .feeds import wrong_names as wrong_names
from .step_check import StepCheck as StepCheck
from .step_check import check_state as check_state
from .step_check import no_state as no_state
from .value_checks import FiniteCheck as FiniteCheck
from .value_checks import InputValueCheck as InputValueCheck
from .value_checks import MaskCheck as MaskCheck
from .value_checks import check_filled as check_filled
