"""How examples are spread over clients."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="its versions of other packages are not those of the other tests: see .ci/run")

from gbfunc.federated import partition


@given(st.integers(1, 8), st.sampled_from([0.3, 1.0, math.inf]), st.integers(0, 5))
def test_parts_are_disjoint_and_all(clients: int, alpha: float, seed: int) -> None:
    parts = partition(np.arange(400) % 7, clients, alpha, seed)
    assert len(parts) == clients and min(map(len, parts)) >= 10
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(400))


def test_a_small_concentration_gives_clients_few_classes() -> None:
    labels = np.arange(5_000) % 10
    few, all_ = ([np.bincount(labels[p]).max() / len(p) for p in partition(labels, 20, a)] for a in (0.3, math.inf))
    assert np.mean(few) > 0.3 > 0.2 > np.mean(all_)
    for labels, clients, alpha, words in (
        ([0, 1], 1, 1.0, "need 10 examples"),
        ([0] * 50, 0, 1.0, "clients >= 1"),
        ([0] * 50, 2, -1.0, "alpha > 0"),
    ):
        with pytest.raises(ValueError, match=words):
            partition(labels, clients, alpha)
