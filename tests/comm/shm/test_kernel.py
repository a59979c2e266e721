import ctypes
import threading
import time

from hocket.comm.shm import kernel as _kernel
from hocket.testing import deadline


def _word() -> tuple[ctypes.c_uint32, int]:
    word = ctypes.c_uint32(7)
    return word, ctypes.addressof(word)


def test_futex_wait_returns_at_once_when_the_word_has_changed():
    word, address = _word()
    begin = time.monotonic()
    _kernel.futex_wait(address, 6, 5.0)
    assert time.monotonic() - begin < deadline(1.0)
    assert word.value == 7


def test_futex_wait_ends_at_its_timeout():
    _, address = _word()
    begin = time.monotonic()
    _kernel.futex_wait(address, 7, 0.2)
    assert 0.15 < time.monotonic() - begin < deadline(2.0)


def test_a_sleeper_is_woken_and_does_not_hold_the_gil():
    word, address = _word()
    woken = threading.Event()

    def sleep() -> None:
        _kernel.futex_wait(address, 7, 10.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    time.sleep(0.1)  # this thread could not run if the sleeper held the GIL
    assert not woken.is_set()
    word.value = 8
    _kernel.futex_wake(address)
    assert woken.wait(deadline(2.0))
    thread.join()


def test_the_fence_of_processors_without_total_store_order_runs():
    _kernel._two_mutexes()()
