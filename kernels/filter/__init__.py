"""Filtered gradients: products that leave out most of the gradient of the logits.

A trained softmax is mostly empty: nearly all of it lies in few tiles of 128 tokens by 128 vocabulary entries. A tile of
the gradient G is *active* if one of its entries exceeds its token's limit, or is the gradient of a target that several
tokens share. (Of other targets G has 0: :mod:`parallel_lce.kernels.token_gradients`.) The limit is what the token's row
of G holds where the probability is that of the filter. The backward's products take the active tiles alone. In each of
the others G is replaced by a product of a number per token and one per entry:

    G_ij ~ m_it q_j        m_it = sum_j G_ij over tile t        q_j = sum_i |G_ij| u_i / sum_j sum_i |G_ij| u_i

The sums of q run over the tokens whose tile is not active, and ``u_i = 1 / limit_i``, of a filter of 1, counts each
token's probabilities alike. The sums over entries, the *masses* m, are those of G. So are the sums over tokens, if all
tokens have the same coefficient. Then

    dX_i gets m_it c_t, with the centroid c_t = sum_j q_j W_j        dW_j gets q_j S_t, with S_t = sum_i m_it x_i

Both products with m have at most 1/128 of the full products' size, and are left to cuBLAS.

A slice of G that is in memory takes these launches: a scan of the tiles (:mod:`.tiles`), which finds the largest
entries, the masses and the sums over tokens; the lists of active tiles. Then, for dX, the centroids, their product with
the masses, and the product with the active tiles; for dW the sums S_t, and the product with the active tiles, to which
``q_j S_t`` is added (:mod:`.products`). Limits, shares and the order in which the
results of a product are formed are small operations of torch.

A slice that is not in memory would be projected again. But the forward keeps the maximum and the sum of exponentials of
each token's windows, so that the largest probability of a window and its mass are known (:mod:`.windows`). The lists
are made of these, and windows take the place of tiles in what stands for the others: m_it and q_j are those of window
t. The active windows alone are projected, and are then tiles. A sample of the tokens, which is projected in full, and
the mean logits tell how the mass of the others is shared.

Limits: what a filter changes is not bounded by anything but its probability, and grows with how much of the softmax
lies in tiles without a large one. G must be a probability times one number per token, except at the targets, up to a
soft-cap's slope. Rows of G begin at multiples of 16 bytes. Windows need G of 16 bits, no soft-cap, and windows of one
or two tiles. The results are the same from run to run.
"""
