"""The operations of linear attention with cleaned queries; a folder an operator, and `choose` says what runs of it."""

from ccq.ops.choose import BackendFallbackWarning, BackendUnavailableError, backends
from ccq.ops.clean import clean_query, clean_query_step, correction, sigma_q, sigma_q_step
from ccq.ops.clean.library import Gate, gate
from ccq.ops.clean.state import CovarianceState
from ccq.ops.recurrence.decode import Cleaning, decode_step

__all__ = [
    "BackendFallbackWarning",
    "BackendUnavailableError",
    "Cleaning",
    "CovarianceState",
    "Gate",
    "backends",
    "clean_query",
    "clean_query_step",
    "correction",
    "decode_step",
    "gate",
    "sigma_q",
    "sigma_q_step",
]
