#!/usr/bin/env bash
# Break a real GPU in many ways, each for one process (a mount namespace, a variable, a limit); nothing on the card or
# the machine is changed. Prints each state, the cause that transload names, and the true cause.
#
# Usage, as root on a Linux machine with an NVIDIA GPU and a CUDA build of torch:
#   bench/gpu/doctor_states.sh [python]
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=$(realpath -s "$(command -v "${1:-python3}")")
export PYTHONPATH=$PWD/src
SCRATCH=$(mktemp -d)
chmod 755 "$SCRATCH"
trap 'rm -rf "$SCRATCH"' EXIT
right=0 total=0
LIMIT=480 # seconds after which no further state is begun

# verdict COMMAND…: the code of the cause, or the status if there is none.
verdict() {
    "$@" >"$SCRATCH/report.json" 2>"$SCRATCH/errors"
    "$PYTHON" - "$SCRATCH/report.json" <<'END'
import json, sys
try:
    report = json.load(open(sys.argv[1]))
except ValueError:
    print("no-report")
else:
    errors = [f["code"] for f in report["findings"] if f["severity"] == "error"]
    print("+".join(errors) or report["status"])
END
}

# state NAME TRUTH COMMAND…
state() {
    local name=$1 truth=$2 named begun=$SECONDS
    shift 2
    total=$((total + 1))
    [ "$SECONDS" -lt "$LIMIT" ] || { printf '%-34s not begun: %d s have passed\n' "$name" "$SECONDS"; return; }
    named=$(verdict "$@")
    case "|$truth|" in *"|$named|"*) right=$((right + 1)) mark=ok ;; *) mark=WRONG ;; esac
    printf '%-34s named %-12s truth %-12s %3d s %s\n' "$name" "$named" "$truth" $((SECONDS - begun)) "$mark"
    if [ $mark = WRONG ]; then
        "$PYTHON" -c 'import json,sys; r=json.load(open(sys.argv[1])); [print("   ",f["code"],f["title"],f["evidence"]) for f in r["findings"]]' \
            "$SCRATCH/report.json" 2>/dev/null || tail -3 "$SCRATCH/errors"
    fi
}

doctor=(timeout 90 "$PYTHON" -m transload doctor --json)
# inside COMMANDS: the doctor in a mount namespace of its own, after some shell commands.
inside() { unshare --mount --propagation private bash -c "$1; exec \"\$@\"" - "${doctor[@]}"; }
# nobody COMMANDS: the same, and then as a user who is nobody.
nobody() {
    unshare --mount --propagation private bash -c "$1; shift; exec setpriv --reuid=65534 --regid=65534 --clear-groups \"\$@\"" \
        - - env HOME=/nonexistent "${doctor[@]}"
}

state healthy ok "${doctor[@]}"
for value in "" -1 7 gpu0 GPU-deadbeef '"0"' "1,0" "cuda:0"; do
    state "CUDA_VISIBLE_DEVICES='$value'" "E01|E02|E04" env CUDA_VISIBLE_DEVICES="$value" "${doctor[@]}"
done
for value in 0 " 0" "0,7" "0,"; do
    state "CUDA_VISIBLE_DEVICES='$value'" "ok|degraded" env CUDA_VISIBLE_DEVICES="$value" "${doctor[@]}"
done
state "CUDA_VISIBLE_DEVICES='0,0'" E03 env CUDA_VISIBLE_DEVICES=0,0 "${doctor[@]}"
state "CUDA_DEVICE_ORDER=nonsense" E12 env CUDA_DEVICE_ORDER=nonsense "${doctor[@]}"
state "CUDA_FORCE_PTX_JIT=1" A04 env CUDA_FORCE_PTX_JIT=1 "${doctor[@]}"
state "ulimit -v 8 GB" X04 bash -c 'ulimit -v 8388608; exec "$@"' - "${doctor[@]}"

for node in nvidiactl nvidia0 nvidia-uvm; do
    state "$node is /dev/null" D02 inside "mount --bind /dev/null /dev/$node"
    state "$node unreadable, as nobody" D03 nobody \
        "touch $SCRATCH/$node; rm -f $SCRATCH/$node; cp -a /dev/$node $SCRATCH/$node; chmod 600 $SCRATCH/$node; mount --bind $SCRATCH/$node /dev/$node"
    state "$node on a nodev mount" D03 inside \
        "mkdir -p $SCRATCH/nodev; mount -t tmpfs -o nodev none $SCRATCH/nodev; cp -a /dev/$node $SCRATCH/nodev/; mount --bind $SCRATCH/nodev/$node /dev/$node"
done

stub=$(find / -xdev -path '*stubs/libcuda.so' 2>/dev/null | head -1)
if [ -n "$stub" ]; then
    mkdir -p "$SCRATCH/stubs"
    ln -sf "$stub" "$SCRATCH/stubs/libcuda.so.1"
    state "the toolkit's stub first" U04 env LD_LIBRARY_PATH="$SCRATCH/stubs:${LD_LIBRARY_PATH:-}" "${doctor[@]}"
fi
mkdir -p "$SCRATCH/text"
echo "this is no library" >"$SCRATCH/text/libcuda.so.1"
state "libcuda.so.1 is a text" U13 env LD_LIBRARY_PATH="$SCRATCH/text:${LD_LIBRARY_PATH:-}" "${doctor[@]}"
for kind in hangs crashes; do
    mkdir -p "$SCRATCH/$kind"
    "$PYTHON" -c "
import sys; sys.path.insert(0, '.')
from tests.fake_driver import fake_libcuda, $kind
open(sys.argv[1], 'wb').write(fake_libcuda(overrides={'cuInit': $kind()}))" "$SCRATCH/$kind/libcuda.so.1"
done
state "a driver that hangs" "X02|U13|V05" env LD_LIBRARY_PATH="$SCRATCH/hangs:${LD_LIBRARY_PATH:-}" "${doctor[@]}"
state "a driver that crashes" "X08|U13|V05" env LD_LIBRARY_PATH="$SCRATCH/crashes:${LD_LIBRARY_PATH:-}" "${doctor[@]}"

mkdir -p "$SCRATCH/shadow/torch" "$SCRATCH/cwd"
echo "x = 1" >"$SCRATCH/shadow/torch/__init__.py"
state "a folder torch that is none" P03 env PYTHONPATH="$SCRATCH/shadow:$PYTHONPATH" "${doctor[@]}"
echo "x = 1" >"$SCRATCH/cwd/torch.py"
state "torch.py in the current folder" P03 bash -c "cd $SCRATCH/cwd && exec \"\$@\"" - "${doctor[@]}"
# A torch that hangs: the installed one, inside something that it imports, in Python and in C; and a file of its name.
mkdir -p "$SCRATCH/hang"
for kind in time.sleep ctypes.pause; do
    echo "import ctypes, time; ctypes.pause = lambda _: ctypes.PyDLL(None).pause(); $kind(600)" \
        >"$SCRATCH/hang/typing_extensions.py"
    state "import torch hangs in $kind" X11 env PYTHONPATH="$SCRATCH/hang:$PYTHONPATH" "${doctor[@]}"
    grep -o 'hung in import at [^"]*' "$SCRATCH/report.json" | head -1
    cat "$SCRATCH/errors"
done
echo "import time; time.sleep(600)" >"$SCRATCH/cwd/torch.py"
state "a torch.py that hangs" P03 bash -c "cd $SCRATCH/cwd && exec \"\$@\"" - "${doctor[@]}"
libs=$("$PYTHON" -c 'import torch, os; print(os.path.dirname(torch.__file__) + "/lib")')
state "libtorch_cuda.so emptied" "T09" inside "mount --bind /dev/null $libs/libtorch_cuda.so"
cudnn=$("$PYTHON" -c 'import glob, torch, os; r = os.path.dirname(os.path.dirname(torch.__file__)); print((glob.glob(r + "/nvidia/cudnn/lib/libcudnn.so.9") or [""])[0])')
[ -n "$cudnn" ] && state "the wheel's libcudnn.so.9 gone" "L04|L05" inside "mkdir -p $SCRATCH/none; mount --bind $SCRATCH/none ${cudnn%/*}"

"$PYTHON" - "$SCRATCH/full" <<'END' &
import sys, time, torch
free, _ = torch.cuda.mem_get_info()
held = [torch.empty(1 << 26, dtype=torch.uint8, device="cuda")]
try:
    while True:
        held.append(torch.empty(1 << 26, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    open(sys.argv[1], "w").close()
time.sleep(90)
END
holder=$!
for _ in $(seq 60); do [ -e "$SCRATCH/full" ] && break; sleep 1; done
state "no memory left on the card" X06 "${doctor[@]}"
kill $holder
wait $holder 2>/dev/null
state "healthy again" ok "${doctor[@]}"
echo "$right of $total named rightly"
