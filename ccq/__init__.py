"""Curvature-Conditioned Queries: q_clean = q - lam * Sigma_t q, with Sigma_t the running covariance of the keys."""

from ccq.ops import CovarianceState, backends, clean_query, clean_query_step, sigma_q, sigma_q_step
from ccq.pretrained import load

__version__ = "0.1.0"
__all__ = ["CovarianceState", "backends", "clean_query", "clean_query_step", "load", "sigma_q", "sigma_q_step"]
