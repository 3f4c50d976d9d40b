"""Features of a call, each in a room of its own (:mod:`parallel_lce.call.call`)."""

from parallel_lce.call.call import FEATURES
from parallel_lce.features.filter import Filter
from parallel_lce.features.selected import Selected
from parallel_lce.features.top_k import TopK

FEATURES[:] = Selected, TopK, Filter
