"""The operator in Triton: the chunkwise algorithm of chunk.py, forward and backward.

scans.py has the kernels that carry states from chunk to chunk, reads.py those that read them, hopper.py the reads for
Hopper, gate.py the gate; launch.py calls them.

BT tokens of one head are a tile, S tokens a chunk. For each chunk one K x K state is kept, for each BN tokens one
running key sum. With x for q (in the forward) or g = dL/dq_clean (in the backward):

    t Sigma_t x_t = sum_{chunk, j<=t} (k_j . x_t - m_t) k_j  +  n [ Sigma_0 x_t + mu_0 (mu_0 . x_t - m_t) ]

where m_t = s_t . x_t / t, and n, mu_0, Sigma_0 are count, mean and covariance before the chunk. So the mean is taken
off the scores before they are rounded, and a state is stored divided by n: it never overflows, and a strong mean costs
it no bits. m_t comes from the row sums of scores that are there anyway: centring needs no product of its own.

    forward    keys (k_bar, 1/|k|, sums) -> running sums -> states -> clean
    backward   keys, running sums, states -> Sigma g, dlam -> finish (dq, w_t, pulls) -> running pulls -> adjoint
               states -> dk

Products are bf16 for bf16, tf32 for fp16 (its mantissa, the range of fp32), three tf32 for fp32; sums are fp32. There
are no atomics: equal inputs give equal bits. Offsets inside a tile are 32 bits, those of tiles 64.

Legend: N sequences of M tokens in all, H key heads, HQ query heads, G = HQ / H, K key size, BK = K rounded up to a
power of two; a state has blocks of BLK x BLK, of which only those on and below the diagonal are computed.
"""
