"""A forged torch for Windows, with the Python and the Visual C++ runtime that it needs."""

from __future__ import annotations

from tests.diagnose.windows_trees import BASE, SYSTEM, VENV
from tests.pe_forge import dll

from transload.machine import Python

Files = dict[str, str | bytes | None]
TORCH = f"{VENV}/Lib/site-packages/torch"
PYTHON = Python(
    f"{VENV}/Scripts/python.exe",
    "3.13.2",
    prefix=VENV,
    base_prefix=BASE,
    user_site="C:/Users/Jo Doe/AppData/Roaming/Python/Python313/site-packages",
)
INIT = """
    py_root_bin_path = os.path.join(sys.exec_prefix, "bin")
    usebase_path = os.path.join(sysconfig.get_config_var("userbase"), "Library", "bin")
    os.getenv("NVTOOLSEXT_PATH", "")
    cuda_path_var = "CUDA_PATH_V" + cuda_version_1
    ctypes.CDLL("vcruntime140.dll")
    ctypes.CDLL("msvcp140.dll")
    res = kernel32.LoadLibraryExW(dll, None, 0x00001100)
"""
RUNTIME = ("memcpy", "__CxxFrameHandler4")
WHOLE: Files = {
    f"{SYSTEM}/kernel32.dll": b"not read: it is a part of Windows",
    f"{SYSTEM}/msvcp140.dll": dll(imports={"VCRUNTIME140.dll": RUNTIME[:1]}, exports=["lock"], version="14.44.35211.0"),
    f"{BASE}/python.exe": dll(imports={"python313.dll": ["Py_Main"], "KERNEL32.dll": ["GetTickCount"]}),
    f"{BASE}/python313.dll": dll(imports={"VCRUNTIME140.dll": RUNTIME[:1]}, exports=["Py_Main", "Py_New"]),
    f"{BASE}/vcruntime140.dll": dll(exports=RUNTIME, version="14.42.34226.3"),
    f"{TORCH}/__init__.py": INIT,
    f"{TORCH}/_C.cp313-win_amd64.pyd": dll(imports={"torch_python.dll": ["init"], "python313.dll": ["Py_New"]}),
    f"{TORCH}/lib/c10.dll": dll(
        imports={"MSVCP140.dll": ["lock"], "api-ms-win-crt-heap-l1-1-0.dll": ["malloc"], "kernel32.dll": ["Sleep"]},
        exports=["alloc"],
        linker=(14, 42),
        writable=1 << 16,
    ),
    f"{TORCH}/lib/libomp.dll": dll(linker=(14, 50), writable=1 << 16),
    f"{TORCH}/lib/torch_cpu.dll": dll(imports={"c10.dll": ["alloc"]}, delayed=["nvcuda.dll"], exports=["add"]),
    f"{TORCH}/lib/torch_python.dll": dll(
        imports={"torch_cpu.dll": ["add"], "c10.dll": ["alloc"], "python313.dll": ["Py_New"]}, exports=["init"]
    ),
}
NEEDS_Z = dll(imports={"Z.dll": ["deflate"]}, exports=["add"])
Z = dll("z.dll", exports=["deflate"], version="1.2.3.4")
