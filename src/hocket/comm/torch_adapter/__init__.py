"""The one place that names what torch does not document: other modules take these names from here.

torch's own stubs leave out or mistype most of them, hence `Any`.
"""

from ._back_propagation import accumulates, before_backward, in_backward, queue_callback
from ._collectives import called_by, gathered_by_program, hearing_collectives, reduced, without_collectives
from ._graph import graph_marks, is_compiled, leaves, met, reaches, readers, result_sizes, sums_over_ranks, version_of
from ._groups import (
    CUSTOM_BACKEND,
    DEFAULT_TIMEOUT,
    HAS_HOOKS,
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BackendBase,
    BarrierOptions,
    BroadcastOptions,
    DistNetworkError,
    DistStoreError,
    FileStore,
    GatherOptions,
    HashStore,
    PrefixStore,
    ProcessGroupBase,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    TCPStore,
    all_gather_single,
    ask,
    begun,
    default_store,
    is_dtensor,
    let_reducers_keep_works,
    process_group_gloo,
    process_group_nccl,
    read_whole_numbers,
    reduce_scatter_single,
    replace_rendezvous,
    wait_for,
)
from ._modes import (
    dispatch_mode,
    function_mode,
    in_transform,
    outside_compiler,
    outside_inference_mode,
    restoring_blocks,
    uncompiled,
    uncounted,
    unsaved,
    unseen,
)
from ._updates import foreach_copy, orthogonalize, pays_low_rank, steps_of

__all__ = [
    "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "BackendBase",
    "BarrierOptions", "BroadcastOptions", "CUSTOM_BACKEND", "DEFAULT_TIMEOUT", "DistNetworkError",
    "DistStoreError", "FileStore", "GatherOptions", "HAS_HOOKS", "HashStore", "PrefixStore", "ProcessGroupBase",
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "Store", "TCPStore", "accumulates",
    "all_gather_single", "ask", "before_backward", "begun", "called_by", "default_store", "dispatch_mode",
    "foreach_copy", "function_mode", "gathered_by_program", "graph_marks", "hearing_collectives", "in_backward",
    "in_transform", "is_compiled", "is_dtensor", "leaves", "let_reducers_keep_works", "met", "orthogonalize",
    "outside_compiler", "outside_inference_mode", "pays_low_rank", "process_group_gloo", "process_group_nccl",
    "queue_callback", "reaches", "read_whole_numbers", "readers", "reduce_scatter_single", "reduced",
    "replace_rendezvous", "restoring_blocks", "result_sizes", "steps_of", "sums_over_ranks", "uncompiled",
    "uncounted", "unsaved", "unseen", "version_of", "wait_for", "without_collectives",
]  # fmt: skip
