"""One job of real processes for the launcher tests: ``job.py SCENARIO [--launcher script] [-n 2] [--out DIR]``.

What a strategy does around a training loop, in its shortest form, and one thing that goes wrong.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torchhal.cluster import LocalEnvironment, TorchElasticEnvironment
from torchhal.distributed._rank_monitor import RankMonitor, StopSignals
from torchhal.distributed.rendezvous import generation_store
from torchhal.launchers import ExternalLauncher, MultiprocessingLauncher, SubprocessScriptLauncher

SET_UP = timedelta(seconds=100)  # a busy machine takes its time to start a process
TIMEOUT = timedelta(seconds=float(os.environ.get("JOB_TIMEOUT", "60")))


@contextlib.contextmanager
def group(environment, folder, *, watched=True):
    """A process group with its watch, failures reported and explained."""
    rank, world = environment.global_rank(), environment.world_size()
    store = generation_store(environment, SET_UP)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=SET_UP)
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(TIMEOUT)  # public since 2.14
    watch = RankMonitor(store, rank, world)
    watch.hang.run_folder = folder
    if watched:
        watch.start()
    try:
        yield watch
    except BaseException as error:
        explained = watch.explain(error)
        watch.report_failure(explained)
        if explained is error:
            raise
        raise explained from error
    finally:
        watch.stop()
        dist.destroy_process_group()


def reduce_sum(value):
    tensor = torch.full((8,), float(value))
    dist.all_reduce(tensor)
    return tensor[0].item()


def note(args, rank, **what):
    if args.out:
        with open(os.path.join(args.out, f"rank{rank}.json"), "w") as file:
            json.dump(what, file)


def mark_failure(args):
    """When it went wrong, for the test's clock: how long a machine takes to get here is not its business."""
    if args.out:
        with open(os.path.join(args.out, "failed"), "w") as file:
            file.write(str(time.time()))


def work(args, environment):
    scenario, rank, world = args.scenario, environment.global_rank(), environment.world_size()
    bad = min(args.bad, world - 1)
    if scenario == "raise_before" and rank == bad:
        mark_failure(args)
        raise ValueError(f"boom on {rank}")
    if scenario == "leaves_late":
        leave_late(args, rank, at_once=rank == bad)
    with group(environment, args.out, watched=not scenario.endswith("_unwatched")) as watch:
        scenario = scenario.removesuffix("_unwatched")
        total = reduce_sum(rank + 1)
        assert total == world * (world + 1) / 2
        if scenario == "ok":
            for _ in range(3):
                reduce_sum(1)
            watch.barrier("end", timedelta(seconds=20))
            return {"rank": rank, "total": total}
        if scenario == "raise":
            if rank == bad:
                mark_failure(args)
                raise ValueError(f"boom on {rank}")
            reduce_sum(1)
        if scenario == "raise_while_others_sleep":
            if rank == bad:
                mark_failure(args)
                raise ValueError(f"boom on {rank}")
            time.sleep(600)
        if scenario == "sys_exit":
            if rank == bad:
                mark_failure(args)
                sys.exit(3)
            reduce_sum(1)
        if scenario in ("sys_exit_0", "os_exit_0"):
            if rank == bad:
                mark_failure(args)
                sys.exit(0) if scenario == "sys_exit_0" else os._exit(0)
            time.sleep(600)
        if scenario == "slow_rank_0" and rank == 0:
            time.sleep(3)  # the other is done with its script by then
        if scenario in ("killed", "killed_others_sleep"):
            if rank == bad:
                mark_failure(args)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600) if scenario.endswith("sleep") else reduce_sum(1)
        if scenario == "wait_forever":
            note(args, rank, pid=os.getpid())
            time.sleep(600)
        if scenario == "hang_in_collective":
            note(args, rank, pid=os.getpid())
            if rank == bad:
                time.sleep(600)
            reduce_sum(1)
        if scenario == "barrier_absent":
            if rank == bad:
                watch.barrier("other", timedelta(seconds=30))
            watch.barrier("first", timedelta(seconds=30))
        if scenario == "barrier_late":
            if rank == bad:
                time.sleep(600)
            mark_failure(args)
            watch.barrier("meeting", timedelta(seconds=2))
        if scenario == "signal":
            train_until_signal(args, watch, rank)
        if scenario == "late_failure":
            watch.barrier("end", timedelta(seconds=20))
    return {"rank": rank, "total": total}


def leave_late(args, rank, *, at_once):
    """One rank dies of a SIGTERM; the others take three seconds to leave on it, and count how many they get."""
    received = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL if at_once else lambda signum, _: received.append(signum))
    note(args, rank, pid=os.getpid())
    while not received:
        time.sleep(0.05)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        time.sleep(0.05)
    note(args, rank, pid=os.getpid(), received=received)
    raise SystemExit(143)


def train_until_signal(args, watch, rank):
    previous = signal.getsignal(signal.SIGTERM)
    with StopSignals(watch.request_stop):
        note(args, rank, pid=os.getpid())
        stopped = None
        while stopped is None:
            reduce_sum(1)
            time.sleep(0.005 * (rank + 1))
            if rank == 0 and watch.steps_done == 3:
                time.sleep(0.5)  # the others wait for it in a collective
            watch.steps_done += 1
            if watch.stop_requested:
                stopped = watch.agree_on_stop_step()
    assert signal.getsignal(signal.SIGTERM) is previous
    note(args, rank, pid=os.getpid(), position=watch.steps_done, signum=stopped)
    reduce_sum(1)
    raise SystemExit(128 + stopped)


def make(args):
    if args.launcher == "none":
        environment = TorchElasticEnvironment()
        return environment, ExternalLauncher()
    environment = LocalEnvironment()
    environment.configure(1, args.n)
    if args.launcher == "script":
        return environment, SubprocessScriptLauncher(environment, args.n)
    return environment, MultiprocessingLauncher(environment, args.n, start_method=args.launcher)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("--launcher", default="script")
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--bad", type=int, default=1)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    environment, launcher = make(args)
    result = launcher.launch(work, args, environment)
    if args.scenario == "twice":
        assert launcher.launch(work, args, environment) == result
    if args.scenario == "20 times":
        for _ in range(19):
            assert launcher.launch(work, args, environment) == result
    if args.scenario == "other_number":
        other = LocalEnvironment()
        SubprocessScriptLauncher(other, 3).launch(work, args, other)
    if args.scenario == "late_failure" and environment.global_rank() == args.bad and args.launcher == "script":
        raise ValueError("boom after the end")
    sys.stdout.write(f"result {json.dumps(result)}\n")


if __name__ == "__main__":
    main()
