"""Batches whose size is global: loaders, samplers, shares, random numbers, and walks through nested structures."""

from ._batch_entries import BatchEntry, digest, due, entries_of
from ._batch_shard import BatchShard, fingerprint
from ._collated import Alone
from ._counts import AgreedCount, TensorCount, possible_counts
from ._cut import BatchPart, BatchSplitter, Cutter, Keywords, cut_fields, samples_in
from ._generators import names_in, own_generators, put_back_generators, set_state, state_of
from ._loader import DistributedLoader, ShardedLoader, SharedLoader
from ._loss_form import GUARDED, LossForm, LossTally, MeasuredLoss, Reduction, batch_of, number
from ._loss_graph import (
    divided_by,
    divides_by_samples,
    divisor_of_shares,
    divisor_of_some,
    divisors,
    guarded,
    inverses,
)
from ._loss_nodes import (
    SAME_VALUES,
    SUMS,
    is_empty,
    is_of_one,
    is_plain,
    is_sum,
    is_taken,
    is_zeroed,
    kind_of,
    of_parameters,
    scaled_by,
    sizes_of,
    takes_one,
)
from ._loss_terms import Term, is_one_by_one, terms, wholes
from ._packed import Packed
from ._rng import RandomStream, RngStates, mix, restored
from ._samples import Key, RankSampler, SeededDataset, each
from ._term_values import Addends, Cancelling, TermValues, addends, fourths, term_off
from ._totals import average, total
from ._traced_numbers import Numbers, TracedNumber, plain, traced
from ._undisturbed import unaltered, undisturbed
from ._user_loader import divides_itself, expected_size, generators, inner_loader
from .trees import called, mapped, tensors_in, views_like

__all__ = [
    "GUARDED", "SAME_VALUES", "SUMS", "Addends", "AgreedCount", "Alone", "BatchEntry", "BatchPart", "BatchShard",
    "BatchSplitter", "Cancelling", "Cutter", "DistributedLoader", "Key", "Keywords", "LossForm", "LossTally",
    "MeasuredLoss", "Numbers", "Packed", "RandomStream", "RankSampler", "Reduction", "RngStates", "SeededDataset",
    "ShardedLoader", "SharedLoader", "TensorCount", "Term", "TermValues", "TracedNumber", "addends", "average",
    "batch_of", "called", "cut_fields", "digest", "divided_by", "divides_by_samples", "divides_itself",
    "divisor_of_shares", "divisor_of_some", "divisors", "due", "each", "entries_of", "expected_size", "fingerprint",
    "fourths", "generators", "guarded", "inner_loader", "inverses", "is_empty", "is_of_one", "is_one_by_one",
    "is_plain", "is_sum", "is_taken", "is_zeroed", "kind_of", "mapped", "mix", "names_in", "number", "of_parameters",
    "own_generators", "plain", "possible_counts", "put_back_generators", "restored", "samples_in", "scaled_by",
    "set_state", "sizes_of", "state_of", "takes_one", "tensors_in", "term_off", "terms", "total", "traced", "unaltered",
    "undisturbed", "views_like", "wholes",
]  # fmt: skip
