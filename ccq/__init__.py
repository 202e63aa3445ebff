"""Curvature-Conditioned Queries: q_clean = q - lam * Sigma_t q, with Sigma_t the running covariance of the keys."""

from typing import TYPE_CHECKING

from ccq.late import lazily, watch

__version__ = "0.2.0"
__all__ = ["CovarianceState", "backends", "clean_query", "clean_query_step", "load", "sigma_q", "sigma_q_step"]
__all__ += ["attach", "detach", "load_adapter", "save_adapter"]

if TYPE_CHECKING:
    from ccq.adapter import attach, detach, load_adapter, save_adapter
    from ccq.ops import CovarianceState, backends, clean_query, clean_query_step, sigma_q, sigma_q_step
    from ccq.pretrained import load
else:
    _PLACES = dict.fromkeys(__all__, "ccq.ops") | {"load": "ccq.pretrained"}
    _PLACES |= dict.fromkeys(("attach", "detach", "load_adapter", "save_adapter"), "ccq.adapter")
    __getattr__ = lazily(__name__, _PLACES | {name: f"ccq.{name}" for name in ("ops", "pretrained", "shipped")})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


watch()
