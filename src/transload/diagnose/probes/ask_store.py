"""Sends every rank's report to rank 0 through torch's TCPStore, and its exit code back. Runs in a child; see ``ask``.

The last six arguments are the rank; the number of ranks; the folder with this rank's report, to which rank 0 adds
those of the others; the name of the result, a file that ends with the exit code and appears in rank 0's folder; the
seconds until it gives up; and the seconds that sending the exit code may take. It uses no collective: a rank that never
starts would make all others fail.
"""

from __future__ import annotations

import os
import sys
import time

from transload.diagnose.probes.ask import Report


def exchange(rank: int, size: int, folder: str, result: str, seconds: float, grace: float) -> None:
    """Send the report to rank 0, and report its exit code; as rank 0, write each report as it arrives."""
    report = Report()
    end = time.monotonic() + seconds
    try:
        report.say(doing="importing torch")
        from datetime import timedelta

        from torch.distributed import TCPStore

        environ = os.environ
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        is_master = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent is
        report.say(doing="connecting to " + address + ":" + str(port))
        left = timedelta(seconds=max(0.1, end - time.monotonic()))
        store = TCPStore(address, port, size, is_master, left, wait_for_workers=False)
        report.say(connected=True)
        name = "transload/" + environ.get("TORCHELASTIC_RESTART_COUNT", "0") + "/"
        if rank:
            with open(os.path.join(folder, f"rank-{rank}.json"), encoding="utf-8") as stream:
                text = stream.read()
            store.wait([name + "reader"])  # the agent may have a store that rank 0 cannot reach
            store.set(name + str(store.add(name + "count", 1)), f"{rank} {text}")
            report.say(sent=True)
            clear(folder)
            store.set_timeout(timedelta(seconds=max(0.1, end - time.monotonic()) + grace))
            code, readers = (int(word) for word in store.get(name + "code").split())
            if store.add(name + "readers", 1) == readers:
                store.set(name + "all", "1")
        else:
            store.set(name + "reader", "1")
            received, result = 0, os.path.join(folder, result)
            while not os.path.exists(result):
                following = name + str(received + 1)  # in the order of arrival
                if received + 1 < size and store.check([following]):
                    sender, _, text = store.get(following).decode().partition(" ")
                    path = os.path.join(folder, f"rank-{int(sender)}.json")
                    with open(path + ".new", "w", encoding="utf-8") as stream:
                        stream.write(text)
                    os.replace(path + ".new", path)
                    received += 1
                else:
                    time.sleep(0.05)
            with open(result, encoding="utf-8") as stream:
                code = int(stream.read().split()[-1])
            clear(folder)
            store.set(name + "code", f"{code} {received}")
            if not received:
                store.set(name + "all", "1")
        try:  # no rank exits before all have the code, since the agent of any of them may host the store
            store.set_timeout(timedelta(seconds=grace / 2))
            store.wait([name + "all"])
        except Exception:  # noqa: BLE001, S110  a rank is slow, or the store is already gone
            pass
        report.say(code=code, complete=True)
    except BaseException as error:  # noqa: BLE001  a broken torch may raise anything
        report.say(failed=(type(error).__name__ + ": " + str(error))[:500])
    report.done()


def clear(folder: str) -> None:
    """Remove what has been read, before any rank ends: see ``Gathering._announce``."""
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


if __name__ == "__main__":
    exchange(int(sys.argv[-6]), int(sys.argv[-5]), sys.argv[-4], sys.argv[-3], float(sys.argv[-2]), float(sys.argv[-1]))
