"""Texts of launchers and loaders around a program: another process failed, and says itself why."""

from __future__ import annotations

from transload.explaining.known import Known

__all__ = ["TABLE"]

TABLE: tuple[Known, ...] = (
    Known(
        "worker-failed",
        (
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
            "torch.multiprocessing.spawn.ProcessRaisedException",
            "torch.multiprocessing.spawn.ProcessExitedException",
            "subprocess.CalledProcessError: Command '{command}' returned non-zero exit status {status:d}",
            "subprocess.CalledProcessError: Command {command} returned non-zero exit status {status:d}",
        ),
        "A launcher says that a process it had started has failed. Why stands in that process's own output, above it "
        "or in its log.",
        role="frame",
    ),
    Known(
        "loader-worker",
        (
            "Caught {error:w} in DataLoader worker process {worker:d}",
            "Caught {error:w} in pin memory thread",
            "Caught {error:w} in replica {replica:d} on device {device:d}",
        ),
        "An error of another process or thread is passed on; its own traceback stands below.",
        role="frame",
    ),
)
