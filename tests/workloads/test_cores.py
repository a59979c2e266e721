from hocket.workloads._cores import Cores, share


def test_every_worker_gets_the_same_number_of_cores_and_none_is_shared() -> None:
    parts = [share((0, 1, 2, 5, 6, 7, 8), rank, 3) for rank in range(3)]
    assert [part.mine for part in parts] == [(0, 1), (2, 5), (6, 7)]
    assert all(part.threads == 2 and part.exclusive for part in parts)


def test_one_worker_has_them_all() -> None:
    assert share((0, 1), 0, 1) == Cores((0, 1), threads=2, exclusive=True)


def test_more_workers_than_cores_share_them() -> None:
    assert share((0, 1), 3, 4) == Cores((0, 1), threads=1, exclusive=False)
    assert str(share((0, 1), 3, 4)) == "1 thread on 2 cores shared by all workers"
    assert str(share((0, 1), 0, 2)) == "1 core of its own"
