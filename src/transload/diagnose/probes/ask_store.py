"""Brings the reports of all ranks to rank 0 through torch's TCPStore. Runs in a child; see ``ask``.

The last four arguments are the rank, the number of ranks, the folder with this rank's report, in which rank 0 also
writes those of the others, and the seconds until it gives up. No collective is used: a rank that never comes would
make all others fail.
"""

from __future__ import annotations

import os
import sys
import time

from transload.diagnose.probes.ask import begin


def exchange(rank: int, size: int, folder: str, seconds: float) -> None:
    """Send the report to rank 0; as rank 0, write each as it comes."""
    report = begin()
    end = time.monotonic() + seconds
    try:
        report.doing("importing torch")
        from datetime import timedelta

        from torch.distributed import TCPStore

        environ = os.environ
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        keeps = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else the agent of torchrun does
        report.doing("connecting to " + address + ":" + str(port))
        left = timedelta(seconds=max(0.1, end - time.monotonic()))
        store = TCPStore(address, port, size, keeps, left, wait_for_workers=False)
        report.say(connected=True)
        name = "transload/" + environ.get("TORCHELASTIC_RESTART_COUNT", "0") + "/"
        if rank:
            with open(os.path.join(folder, f"rank-{rank}.json"), encoding="utf-8") as stream:
                text = stream.read()
            store.wait([name + "reader"])  # the agent's store is there though rank 0 may not be able to read it
            store.set(name + str(store.add(name + "count", 1)), f"{rank} {text}")
        else:
            store.set(name + "reader", "1")
        for place in range(1, 1 if rank else size):  # in the order of arrival, so that only the end can be late
            store.set_timeout(timedelta(seconds=max(0.1, end - time.monotonic())))
            sender, _, text = store.get(name + str(place)).decode().partition(" ")
            path = os.path.join(folder, f"rank-{int(sender)}.json")
            with open(path + ".new", "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(path + ".new", path)
        report.say(complete=True)
    except BaseException as error:  # noqa: BLE001  a torch that is broken may raise anything
        report.say(failed=(type(error).__name__ + ": " + str(error))[:500])
    report.done()


if __name__ == "__main__":
    exchange(int(sys.argv[-4]), int(sys.argv[-3]), sys.argv[-2], float(sys.argv[-1]))
