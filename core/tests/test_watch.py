"""What ranks tell each other: failures, stops, barriers. Ranks are threads here, over a real store."""

import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from limits import scaled

from torchhal.distributed import (
    _process_inspection as process_inspection,
)
from torchhal.distributed import (
    _rank_handshake as rank_handshake,
)
from torchhal.distributed import (
    _rank_monitor as watch,
)
from torchhal.distributed import (
    _rendezvous_state as rendezvous_state,
)
from torchhal.distributed import (
    _store_client as store_client,
)
from torchhal.distributed import failures, rendezvous, stores
from torchhal.distributed._process_inspection import Presence, Sighting
from torchhal.distributed._rank_monitor import RankMonitor, StopSignals
from torchhal.distributed.failures import Failure, is_timeout, is_transport_error
from torchhal.distributed.signals import SignalRecorder
from torchhal.errors import CollectiveTimeoutError, DistributedError, RankFailedError

SECOND = timedelta(seconds=1)


@pytest.fixture
def server():
    port = rendezvous.start_store("127.0.0.1")
    yield port
    rendezvous.stop_store("127.0.0.1", port)


@pytest.fixture
def left(monkeypatch):
    """Instead of ending the test session, note the exit code."""
    codes = []
    monkeypatch.setattr(watch, "leave", codes.append)
    return codes


@pytest.fixture
def crew(server, tmp_path):
    """``crew(n)``: n started watches, each with its own connection; of a ``world`` of more, the first."""
    watches = []

    def make(started, world=None, **options):
        options = {"interval": 0.02, "announce": False, **options}
        for rank in range(started):
            client = dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False)
            store = stores.PrefixedStore("torchhal/1", client)
            watches.append(RankMonitor(store, rank, world or started, **options).start())
            watches[-1].hang.run_folder = str(tmp_path)
        return watches

    yield make
    for one in watches:
        one.stop()


def on_all(watches, function):
    """Run ``function(watch)`` for all ranks at once; results or exceptions."""
    with ThreadPoolExecutor(len(watches)) as pool:
        futures = [pool.submit(function, one) for one in watches]
        return [future.exception(timeout=30) or future.result() for future in futures]


def raised(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


# -- failure -------------------------------------------------------------------------------------------------


def test_a_peers_error_becomes_the_failing_ranks(crew):
    first, second = crew(2)
    cause = raised(lambda: 1 / 0)
    second.report_failure(cause)
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:18847")
    error = first.explain(lost)
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert "ZeroDivisionError" in error.traceback
    assert str(error).startswith("rank 1 failed: ZeroDivisionError: division by zero")
    assert error.__cause__ is lost
    with pytest.raises(RankFailedError):
        first.barrier("x", SECOND)


def test_the_earliest_failure_counts(crew):
    watches = crew(4)
    for rank in (2, 1, 3):
        watches[rank].report_failure(ValueError(f"from {rank}"))
    assert watches[0].root_cause().rank == 2
    assert watches[1].root_cause().rank == 2


def test_an_error_of_this_ranks_own_stays_itself(crew):
    first, second = crew(2)
    second.report_failure(ValueError("elsewhere"))
    for error in (ValueError("mine"), RuntimeError("DataLoader timed out after 5 seconds"), KeyError("wait timeout")):
        assert first.explain(error) is error


def test_a_rank_that_only_followed_reports_nothing(crew):
    first, second = crew(2)
    first.report_failure(RankFailedError("rank 1 failed", rank=1))
    assert second.root_cause(0.3) is None


@pytest.mark.parametrize(
    ("text", "transport", "timeout"),
    [
        ("Connection closed by peer [127.0.0.1]:18847. This is typically caused by a remote worker", True, False),
        ("Application timeout caused pair closure", True, True),  # gloo, of a reduce
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection reset by peer", True, False),
        ("Timed out waiting 8000ms for recv operation to complete", True, True),
        ("Wait timeout", True, True),
        ("wait timeout after 300ms, keys: /nope", True, True),
        ("Gloo connectFullMesh failed with ... Connection refused", True, False),
        ("[enforce fail at pair.cc:1] op.preamble.length <= op.nbytes. 256 vs 128 gloo::EnforceNotMet", True, False),
        ("Watchdog caught collective operation timeout: WorkHandle(SeqNum=1) timed out", True, True),
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)", False, False),
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory", False, False),
        ("DataLoader worker (pid 1) is killed by signal: Killed.", False, False),
        ("request timed out", False, False),
    ],
)
def test_which_messages_are_consequences(text, transport, timeout):
    error = RuntimeError(text)
    assert (is_transport_error(error), is_timeout(error)) == (transport, timeout)
    assert not is_transport_error(OSError(text))


def test_signalled_rank_ends_others(left, crew):
    """It is no failure, and who doesn't come back leaves with the signal's code, too."""
    first, second, third = crew(3, grace=0.5)
    second.report_stop(signal.SIGTERM)
    second.report_failure(SystemExit(143))  # which is how it leaves
    with pytest.raises(RankFailedError) as caught:
        first.barrier("x", SECOND * 20)
    assert (caught.value.rank, caught.value.stop_signal) == (1, signal.SIGTERM)
    assert third.root_cause().stop_signal == signal.SIGTERM
    deadline = time.monotonic() + scaled(20)
    while not left and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(left) == {143}


def test_signalled_rank_ends_meeting(server, monkeypatch):
    """A rank that waits to meet one that left on a signal follows it."""
    stores_of = [dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False) for _ in range(2)]
    monkeypatch.setattr(rendezvous_state, "_process", rendezvous_state.RendezvousState())
    rendezvous_state.process_state().job = rendezvous_state.JobStore(
        ("127.0.0.1", server, 2, 1), stores_of[1], "nobody"
    )
    rendezvous.announce_stop(signal.SIGINT)
    group = stores.PrefixedStore("torchhal/1", stores_of[0])
    with pytest.raises(RankFailedError) as caught:
        rendezvous.wait_for_all_ranks(group, 0, 2, SECOND * 30, name="set-up", job=stores_of[0])
    assert (caught.value.rank, caught.value.stop_signal) == (1, signal.SIGINT)
    assert rendezvous_state.process_state().patience < 15
    rendezvous.begin_call()  # the interrupt was caught, and the next fit begins
    assert rendezvous_state.process_state().patience > 15


def test_stop_ends_own_call_only(server, monkeypatch):
    """Who caught the interrupt on every rank fits again, and a rank comes to that late."""
    stores_of = [dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False) for _ in range(2)]
    monkeypatch.setattr(rendezvous_state, "_process", rendezvous_state.RendezvousState())
    state = rendezvous_state.process_state()
    state.job = rendezvous_state.JobStore(("127.0.0.1", server, 2, 1), stores_of[1], "nobody")
    rendezvous.begin_call()
    rendezvous.announce_stop(signal.SIGINT)
    before = state.call
    rendezvous.begin_call()
    for call, ends in ((before, RankFailedError), (state.call, CollectiveTimeoutError)):
        again = stores.PrefixedStore(f"torchhal/of-{call}", stores_of[0])
        with pytest.raises(ends):
            rendezvous.wait_for_all_ranks(again, 0, 2, SECOND * 3, name="set-up", job=stores_of[0], call=call)


def test_no_linger_after_lost_rank(crew, monkeypatch):
    """A rank that is gone without a word, on another host, says none: rank 0 would serve half a minute for nobody."""
    monkeypatch.setattr(rendezvous_state.process_state(), "lingers", True)
    first, _ = crew(2)
    first.report_failure(RankFailedError("rank 1 is gone without a word", rank=1))
    assert not rendezvous_state.process_state().lingers


def test_timeout_names_absent_ranks(crew):
    """A timeout names the ranks that took no part."""
    watches = crew(3)
    lost = RuntimeError("Timed out waiting 8000ms for recv operation to complete")
    results = on_all(watches[:2], lambda one: one.explain(lost, timeout=scaled(0.5), name="reduce"))
    for result in results:
        assert isinstance(result, CollectiveTimeoutError)
        assert (result.missing, result.name) == ((2,), "reduce")
        assert "rank 2 did not take part" in str(result)


def test_timed_out_rank_is_not_finished(crew):
    """A rank that waited in vain and left sooner does not count as finished."""
    watches = crew(2)
    lost = RuntimeError("Timed out waiting 8000ms for recv operation to complete")
    first = watches[0].explain(lost, timeout=scaled(0.1), name="reduce")
    assert isinstance(first, CollectiveTimeoutError) and first.missing == (1,)
    watches[0].stop()
    second = watches[1].explain(lost, timeout=scaled(0.1), name="backward")
    assert "every rank waited for another collective" in str(second), second


def test_a_rank_that_answers_nothing_is_named(crew):
    watches = crew(3)
    watches[1]._stopping = True  # as if killed: no goodbye
    time.sleep(0.1)
    error = watches[0].explain(RuntimeError("Connection closed by peer"), timeout=scaled(0.5))
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert "gone without a word" in str(error)


LOST = RuntimeError("Connection closed by peer [127.0.0.1]:18847")


def unstarted(crew, server):
    """A rank's watch, and the store of another that has none yet."""
    (first,) = crew(1, world=2)
    client = dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False)
    return first, stores.PrefixedStore("torchhal/1", client)


def test_failed_setup_is_reported(crew, server):
    """A living rank whose set-up failed is not reported as killed."""
    first, store = unstarted(crew, server)
    RankMonitor(store, 1, 2, announce=False).report_failure(OSError("no such device"))
    error = first.explain(LOST)
    assert isinstance(error, RankFailedError)
    assert str(error).startswith("rank 1 failed: OSError: no such device")


def test_unfinished_setup_is_reported(crew, server):
    """A rank that has not come out of its set-up is not reported as killed."""
    first, _ = unstarted(crew, server)
    error = first.explain(LOST, timeout=scaled(0.2))
    assert str(error).startswith("rank 1 has not come out of its set-up")
    assert "memory" not in str(error)


@pytest.mark.parametrize(
    ("presence", "seen", "memory"),
    [
        (Presence.GONE, "its process 4711 is gone", True),
        (Presence.THERE, "its process 4711 is stopped (by SIGSTOP, or Ctrl-Z)", False),
        (Presence.ELSEWHERE, "its process 4711 on n2 answers nothing", True),
    ],
)
def test_silent_rank_report(crew, monkeypatch, presence, seen, memory):
    """Who lives was not killed for want of memory."""
    first, second = crew(2)
    second.stop()
    monkeypatch.setattr(first, "_has_left", lambda rank: False)
    monkeypatch.setattr(process_inspection, "inspect_process", lambda process_record: Sighting(presence, seen))
    error = first.explain(LOST, timeout=scaled(0.2))
    assert isinstance(error, RankFailedError) and error.rank == 1
    assert ("too little memory?" in str(error)) == memory, error
    assert f"rank 1: {seen}" in str(error)


def test_teardown_on_error_is_failure(crew):
    """In a loop of one's own the tear-down comes before anybody has heard of the error."""
    first, second = crew(2)
    second.stop(ValueError("a bad batch"))
    error = first.explain(LOST, timeout=scaled(0.2))
    assert isinstance(error, RankFailedError)
    assert str(error).startswith("rank 1 failed: ValueError: a bad batch")


def test_an_error_that_nobody_catches_is_reported(crew, monkeypatch):
    first, second = crew(2)
    monkeypatch.setattr(watch, "active_watches", lambda: [second])
    watch._report_uncaught(ValueError("in a loop of one's own"))
    assert "rank 1 failed: ValueError: in a loop" in str(first.explain(LOST))


def test_exit_without_teardown_is_finished(crew, monkeypatch):
    """A process that ends without a teardown is not reported as killed."""
    first, second = crew(2)
    monkeypatch.setattr(watch, "active_watches", lambda: [second])
    watch._stop_at_exit()
    error = first.explain(LOST, timeout=scaled(0.2))
    assert isinstance(error, CollectiveTimeoutError) and "rank 1 has ended its work" in str(error)


def test_a_hung_rank_is_ended_with_the_report(crew, left, capfd):
    first, second = crew(2, grace=0.3)
    second.report_failure(ValueError("boom"))
    second.stop()
    deadline = time.monotonic() + scaled(5)
    while not left and time.monotonic() < deadline:
        time.sleep(0.02)
    first.stop()
    assert left[0] == 1
    assert "rank 0 is still here 0 s after rank 1 failed, and leaves. It was at:" in capfd.readouterr().err


def test_a_rank_that_came_back_is_not_ended(crew, left):
    first, second = crew(2, grace=0.2, limit=30.0)
    second.report_failure(ValueError("boom"))
    first.explain(RuntimeError("Connection closed by peer"))
    time.sleep(0.6)
    assert not left


def test_the_report_is_printed_once_where_it_happened(server, crew, capfd):
    first, second = crew(2, announce=True)
    error = raised(lambda: 1 / 0)
    second.report_failure(error)
    second.report_failure(error)
    explained = first.explain(RuntimeError("Connection closed by peer"))
    assert failures.was_printed(error)
    assert failures.was_printed(explained)
    assert capfd.readouterr().err.count("Traceback") == 1


def test_a_lost_store_is_named(crew, server, left):
    first, _ = crew(2)
    rendezvous.stop_store("127.0.0.1", server)
    deadline = time.monotonic() + scaled(5)
    while first._lost is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert first.stop_requested
    with pytest.raises(DistributedError, match="rank 0 lost its connection to"):
        first.agree_on_stop_step()
    with pytest.raises(DistributedError, match="lost its connection"):
        first.barrier("x", SECOND)


def test_failures_travel_whole():
    failure = Failure.from_exception(3, raised(lambda: {}["k"]))
    assert Failure.from_json(failure.to_json()) == failure
    long = Failure.from_exception(0, ValueError("\N{SNOWMAN}" * 200_000))
    assert len(long.to_json()) < 65_000


# -- stop ----------------------------------------------------------------------------------------------------


def train(watch, steps, meeting, seed):
    """A loop whose every step needs all ranks, at its own pace; where it stopped."""
    pace = random.Random(seed * 1000 + watch.rank)
    for _ in range(steps):
        time.sleep(pace.random() * 0.004)
        meeting.wait(timeout=20)
        watch.steps_done += 1
        if watch.stop_requested:
            signum = watch.agree_on_stop_step(timeout=10)
            if signum is not None:
                return watch.steps_done, signum
    return watch.steps_done, None


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_stop_after_the_same_step(crew, seed):
    watches = crew(4)
    meeting = threading.Barrier(4)
    who = random.Random(seed)
    for one in who.sample(watches, who.randint(1, 4)):
        threading.Timer(who.random() * 0.3, one.request_stop, [signal.SIGTERM]).start()
    results = on_all(watches, lambda one: train(one, 2000, meeting, seed))
    assert len(set(results)) == 1, results
    position, signum = results[0]
    assert signum == signal.SIGTERM
    assert position < 2000
    assert all(one.stop_signal == signal.SIGTERM for one in watches)


def test_two_signals_make_one_stop(crew):
    watches = crew(3)
    meeting = threading.Barrier(3)
    watches[0].request_stop(signal.SIGTERM)
    watches[2].request_stop(signal.SIGINT)
    results = on_all(watches, lambda one: train(one, 2000, meeting, 0))
    assert len(set(results)) == 1, results


def test_agreement_with_blocked_rank(crew):
    """A rank inside a collective does not hold up the agreement on a step."""
    first, second = crew(2)
    first.steps_done = 7
    second.steps_done = 6  # in a step that needs the first
    first.request_stop(signal.SIGTERM)
    deadline = time.monotonic() + scaled(5)
    while not first.stop_requested and time.monotonic() < deadline:
        time.sleep(0.005)
    assert first.agree_on_stop_step(timeout=5) is None  # step 8 is still to be taken, together
    first.steps_done += 1
    assert first.agree_on_stop_step() == signal.SIGTERM
    second.steps_done += 1
    assert second.agree_on_stop_step() is None
    second.steps_done += 1
    assert second.agree_on_stop_step() == signal.SIGTERM


def test_stop_after_rank_ended_is_void(crew):
    """A stop that comes when a rank has ended is void."""
    first, second = crew(2)
    second.stop()
    first.request_stop(signal.SIGTERM)
    deadline = time.monotonic() + scaled(5)
    while not first.stop_requested and time.monotonic() < deadline:
        time.sleep(0.005)
    assert first.agree_on_stop_step(timeout=10) is None
    assert not first.stop_requested


def test_silent_ranks_are_named_when_no_agreement_comes(crew):
    first, second, _ = crew(3)
    second._stopping = True
    time.sleep(0.1)
    first.request_stop(signal.SIGTERM)
    while not first.stop_requested:
        time.sleep(0.005)
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not say within") as info:
        first.agree_on_stop_step(timeout=0.5)
    assert info.value.missing == (1,)


def test_at_end_gives_one_answer(crew):
    watches = crew(3)
    watches[2].request_stop(signal.SIGTERM)
    assert on_all(watches, lambda one: one.agree_on_stop_at_end(SECOND * 10)) == [signal.SIGTERM] * 3


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_exit_agreed_at_end_is_no_failure(crew, signum, capfd):
    """Ranks that leave on a signal after the last step print no traceback, and post nothing to the others."""
    watches = crew(2)
    watches[1].request_stop(signum)
    assert on_all(watches, lambda one: one.agree_on_stop_at_end(SECOND * 10)) == [signum] * 2
    for one in watches:
        one.report_failure(failures.exit_for_signal(signum, agreed=True))
    assert [one.root_cause(timeout=0.5) for one in watches] == [None] * 2
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("wishes", [(signal.SIGTERM, -1), (-1, signal.SIGTERM)])
def test_a_signal_is_not_lost_beside_a_wish(crew, wishes):
    watches = crew(2, interval=5.0)  # nobody looks between the two
    time.sleep(0.1)
    for wish in wishes:
        watches[0].request_stop(wish)
    assert on_all(watches, lambda one: one.agree_on_stop_at_end(SECOND * 10)) == [signal.SIGTERM] * 2


def test_signal_precedes_should_stop(crew):
    """A signal comes before a requested stop at the boundary of a step."""
    watches = crew(2)
    for wish in (-1, signal.SIGTERM):
        watches[0].request_stop(wish)
    deadline = time.monotonic() + scaled(5)
    while any(len(one._agreements) < 2 for one in watches) and time.monotonic() < deadline:
        time.sleep(0.005)
    for one in watches:
        one.steps_done += 1
    assert on_all(watches, lambda one: one.agree_on_stop_step(timeout=5)) == [signal.SIGTERM] * 2


def test_stop_at_end_timeout(crew):
    """The agreement at the end waits as long as its caller sets."""
    first, _ = crew(2)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="end of training"):
        first.agree_on_stop_at_end(SECOND * 0.5)
    assert time.monotonic() - start < rendezvous.DEFAULT_TIMEOUT.total_seconds() / 2


def test_at_end_without_a_signal(crew):
    assert on_all(crew(2), lambda one: one.agree_on_stop_at_end(SECOND * 10)) == [None] * 2


def test_a_world_of_one_needs_no_store():
    with RankMonitor(None, 0, 1) as one:
        one.barrier("x", SECOND)
        assert one.agree_on_stop_step() is None
        error = RuntimeError("Connection closed by peer")
        assert one.explain(error) is error
        one.report_failure(error)
        one.request_stop(signal.SIGINT)
        assert one.stop_requested
        assert one.agree_on_stop_step() == one.agree_on_stop_at_end() == one.stop_signal == signal.SIGINT
        assert one._thread is None


def test_signals_only_set_attributes_and_are_restored(monkeypatch):
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    received = []
    with StopSignals(received.append, signals=(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)) as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
        assert stop.received == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert {signum: signal.getsignal(signum) for signum in before} == before


@pytest.fixture
def own_handler():
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *args: called.append(args[0]))
    yield called
    signal.signal(signal.SIGUSR1, before)


def test_own_handler_of_scheduler_signal(own_handler):
    """A handler of the program for the scheduler's signal stays."""
    received = []
    with (
        StopSignals(received.append, signals=(signal.SIGTERM, signal.SIGUSR1)) as stop,
        SignalRecorder([signal.SIGUSR1]),
    ):
        signal.raise_signal(signal.SIGUSR1)
    assert stop.kept == own_handler == [signal.SIGUSR1]
    assert received == [] and stop.received is None


def test_outer_torchhal_handlers_are_replaced():
    """The latter is what a forked worker inherits."""
    outer, inner = [], []
    with StopSignals(outer.append, signals=[signal.SIGUSR1]), StopSignals(inner.append, signals=[signal.SIGUSR1]):
        signal.raise_signal(signal.SIGUSR1)
    with SignalRecorder([signal.SIGUSR1]) as noted, StopSignals(inner.append, signals=[signal.SIGUSR1]):
        signal.raise_signal(signal.SIGUSR1)
    assert outer == noted.received == []
    assert inner == [signal.SIGUSR1] * 2


BLOCKED = """
import sys, time
import torch.distributed as dist
from torchhal.distributed.signals import StopSignals

StopSignals.REPEAT = 0.5
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
with StopSignals(lambda signum: print("asked", flush=True), grace=1.0):
    print("ready", flush=True)
    if rank == 0:
        dist.barrier()
    end = time.monotonic() + 4
    while time.monotonic() < end:
        time.sleep(0.01)
print("done", flush=True)
"""


def test_second_signal_ends_blocked_rank(tmp_path):
    """Rank 0 waits in C for rank 1, where Python calls no handler; rank 1 is asked twice, too, and goes on."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BLOCKED, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    time.sleep(0.5)
    for pause in (0.1, 0.7, 0):
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        time.sleep(pause)
    outcomes = [(*process.communicate(timeout=60), process.returncode) for process in ranks]
    said, complaint, code = outcomes[0]
    assert (said, code) == ("", 143), "no handler ran"
    assert re.search(r"SIGTERM came again \d s after the first", complaint) and "barrier" in complaint
    said, complaint, code = outcomes[1]
    assert (sorted(set(said.split())), code) == (["asked", "done"], 0) and "came again" not in complaint


def test_signals_outside_the_main_thread_do_nothing():
    before = signal.getsignal(signal.SIGTERM)

    def enter():
        with StopSignals(lambda signum: None):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() is before


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals(lambda signum: None):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- barrier -------------------------------------------------------------------------------------------------


def test_barriers_meet_and_leave_no_keys(crew):
    watches = crew(4)
    on_all(watches, lambda one: one.barrier("warm up", SECOND * 10))
    keys = watches[0]._store.num_keys()
    order = []

    def meet(one):
        for number in range(20):
            time.sleep(random.random() * 0.003)
            one.barrier("step", SECOND * 10)
            order.append(number)

    assert on_all(watches, meet) == [None] * 4
    assert order == sorted(order)
    assert watches[0]._store.num_keys() <= keys + 2


def test_barrier_names_absent_ranks(crew):
    """The error of a barrier names the missing ranks and their places."""
    watches = crew(4)
    on_all(watches[:3] + watches[3:], lambda one: one.barrier("first", SECOND * 10))
    watches[3].stop()
    error = raised(lambda: watches[0].barrier("save", SECOND * 20))
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (1, 2, 3)
    assert "rank 3 has ended its work" in str(error)
    assert "rank 1 was last in barrier 'first'" in str(error)
    assert error.name == "save"


def test_different_barriers_end_at_once(crew):
    watches = crew(2)
    start = time.monotonic()
    one, other = on_all(watches, lambda one: one.barrier(f"at {one.rank}", SECOND * 600))
    assert time.monotonic() - start < 300
    for error, rank in ((one, 1), (other, 0)):
        assert isinstance(error, CollectiveTimeoutError)
        assert f"rank {rank} is in barrier 'at {rank}' instead" in str(error)


def test_a_barrier_ends_when_a_rank_fails(crew):
    first, second = crew(2)
    threading.Timer(0.2, second.report_failure, [ValueError("boom")]).start()
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: boom"):
        first.barrier("x", SECOND * 20)


# -- set-up --------------------------------------------------------------------------------------------------


def test_roll_call_names_who_never_came(server):
    store = dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False)
    with pytest.raises(CollectiveTimeoutError, match=r"start: ranks 0, 2 did not come within 0\.3 s") as info:
        rendezvous.wait_for_all_ranks(store, 1, 3, timedelta(seconds=0.3), name="start")
    assert info.value.missing == (0, 2)


def meet(store, rank, world_size, timeout=20):
    """What a process hears in the roll call."""
    try:
        rendezvous.wait_for_all_ranks(store, rank, world_size, timedelta(seconds=timeout), name="start")
    except DistributedError as error:
        return str(error)
    return None


def test_duplicate_rank_is_named(server, monkeypatch):
    """Both nodes started with NODE_RANK=0, say: the second is refused, and the first hears of it."""
    one, other = (dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False) for _ in range(2))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, one, 0, 2)
        while not one.check(["here/0"]):
            time.sleep(0.01)
        monkeypatch.setattr(rank_handshake.socket, "gethostname", lambda: "n2")
        second = meet(other, 0, 2)
        assert second == first.result(timeout=20)
    assert "rank 0 is here twice, as one of 2 on" in second and "on n2, process" in second


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_processes_that_mean_jobs_of_different_sizes(server, sizes):
    one, other = (dist.TCPStore("127.0.0.1", server, None, False, wait_for_workers=False) for _ in range(2))
    with ThreadPoolExecutor() as pool:
        heard = list(pool.map(meet, (one, other), (0, 1), sizes))
    said = next(filter(None, heard))
    assert f"rank 1 means another job than rank 0: one of {sizes[1]} on" in said
    assert f"rank 0 is one of {sizes[0]} on" in said and "same numbers of devices and nodes" in said
    # rank 0 of a job of two has met two
    assert heard == [said, said] if sizes[0] == 4 else heard[1] == said


def test_a_taken_port_is_an_error(server):
    from torchhal.errors import LaunchError

    with pytest.raises(LaunchError, match=f"port {server} is already in use"):
        rendezvous.start_store("127.0.0.1", server)


def test_nobody_at_the_address():
    with pytest.raises(DistributedError, match=r"rank 1 found nobody at 127\.0\.0\.1:1 .*refused"):
        store_client.find_store("127.0.0.1", 1, 1, time.monotonic() + 0.3)


def test_the_local_store_is_served_on_loopback_only(server):
    import socket

    other = socket.gethostbyname(socket.gethostname())
    if other.startswith("127.0.0.1"):
        pytest.skip("environment: this machine has only its loopback address")
    with pytest.raises(OSError, match=r"refused|timed out"):
        socket.create_connection((other, server), timeout=1).close()
