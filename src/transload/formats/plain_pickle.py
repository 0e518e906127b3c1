"""Plain pickles, which torch.save did not write: those of ``pickle.dump``, cloudpickle, dill and joblib.

A tensor in one is the same call as in a checkpoint, but its storage is a call, too:
``torch.storage._load_from_bytes(b"…")``, whose bytes are a legacy stream with that one storage. ``_EmbeddedData`` reads
these streams, so that a pickle of tensors is a checkpoint. A call with any other bytes stays a call that runs code. A
pickle without tensors is judged, too, since something may load it.

joblib writes the bytes of a numpy array after the opcodes of a wrapper that describes it, and then continues the
pickle. ``pickle`` would read them as opcodes: a file that imports or calls something in both readings is an attack.
Such files are often compressed as a whole: ``unpacked`` decompresses them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from transload.checkpoint import Checkpoint, Draft, Record
from transload.contents import AS_ESCAPED, AS_TEXT
from transload.dtypes import ITEMSIZE, MAX_SIZE, STORAGES
from transload.findings import Problem
from transload.formats.arrays import dtype_of, shape_of
from transload.formats.graph import find_tensors
from transload.formats.pickle_machine import MAX_STREAM, add_uses, run
from transload.formats.pickle_state import LOADER, Broken, Cut, PickleMachine
from transload.formats.pickle_streams import run_at
from transload.formats.tensors import StorageTable
from transload.formats.torch_legacy import MAGIC_PICKLE, MAX_DOUBT, PROTOCOL
from transload.formats.torch_zip import needed_by, pickle_problems, read_tree
from transload.formats.zip import ends_like_zip
from transload.io.packed import Unpacked, packed_as, unpack
from transload.io.sources import Source
from transload.nodes import Call, Dict, Global, Persistent, Pickle, Set, called, dotted, walk_nodes

_MAX_PICKLES = 1000
_WINDOW = 1 << 16
_WRAPPERS = frozenset((f"{package}joblib.numpy_pickle", "NumpyArrayWrapper") for package in ("", "sklearn.externals."))
# Names by which protocols 0 and 1 make an object.
_RECONSTRUCTING = {(module, "_reconstructor") for module in ("copyreg", "copy_reg")}
_RECONSTRUCTING |= {(module, "object") for module in ("builtins", "__builtin__")}
_WRAPPED = frozenset({"subclass", "shape", "order", "dtype"})
_OPTIONAL = frozenset({"allow_mmap", "numpy_array_alignment_bytes"})
_MAX_CALLS = 4096  # between a wrapper and its state: those of a dtype with many fields

# A compressed file may decompress to 64 times its size, or to 256 MiB: a kilobyte can become a gigabyte.
_MAX_UNPACKED_RATIO = 64
_MIN_UNPACKED_LIMIT = 256 << 20
# Bytes between the bytes of a storage and the end of the call that gets them: memo, codec, tuple, perhaps a frame.
_MAX_AFTER = 64


def unpacked(source: Source) -> Source:
    """The decompressed file if it is a plain pickle of tensors or arrays; else the source itself."""
    kind = packed_as(source.read(0, 8))
    limit = max(_MIN_UNPACKED_LIMIT, _MAX_UNPACKED_RATIO * source.size)
    data = bytearray()
    for piece in unpack(source, kind, limit) if kind else ():
        data += piece
        if len(data) >= _WINDOW and not _names_data(data):
            return source
    if not data or not _names_data(data) or len(data) >= limit:
        return source
    inner = Unpacked(data, source.name, kind, source.size)
    checkpoint = read(inner)
    return inner if checkpoint is not None and checkpoint.format == "pickle" and checkpoint.pickles[0].data else source


def _names_data(data: bytearray) -> bool:
    """Whether the first bytes contain the name of torch or joblib."""
    return data.find(b"torch", 0, 1 << 20) >= 0 or data.find(b"joblib", 0, 1 << 20) >= 0


def read(source: Source) -> Checkpoint | None:
    """Read a file that begins with a pickle; ``None`` if it does not.

    A broken pickle counts only if it has named a global before: a text file can begin with valid opcodes by chance.
    """
    storages: dict[str, Record] = {}  # by key
    reader = partial(_EmbeddedData, offset=0, storages=storages)
    first, end = run_at(source, 0, "pickle", _WINDOW, MAX_DOUBT, reader)
    if first.cut and (source.read(0, 1) == b"\x80" or _is_pickle(first, source.size)):
        # A long pickle. With tensors in it there is no limit.
        data = LOADER in first.globals or _WRAPPERS & first.globals.keys()
        window, most = (source.size, source.size) if data else (1 << 20, MAX_STREAM)
        first, end = run_at(source, 0, "pickle", window, most, reader)
    if not _is_pickle(first, source.size) or _is_message_pack(first, source):
        return None
    first.main = True
    _excuse(first, storages)
    _compare_readings(first, source, 0)
    pickles = [first]
    while end < source.size and len(pickles) <= _MAX_PICKLES and not pickles[-1].broken:
        begin, others = end, dict[str, Record]()
        reader = partial(_EmbeddedData, offset=begin, storages=others)
        pickle, end = run_at(source, begin, f"pickle {len(pickles) + 1}", _WINDOW, reader=reader)
        _excuse(pickle, others)
        _compare_readings(pickle, source, begin)
        pickles.append(pickle)
    root = first.root
    kinds = {Dict: "a dictionary", Set: "a set", list: "a list", tuple: "a tuple"}
    kind = kinds.get(type(root), f"a value of type {type(root).__name__}")
    if type(root) is Call:
        kind = f"an object made by {getattr(root.callee, 'module', '?')}.{getattr(root.callee, 'name', '?')}"
    elif first.loader is not None and first.broken:
        kind = "tensors"
    joblib = any(module.startswith("joblib.") for module, _ in first.globals)
    readable = first.data
    out = Draft(source.name, "joblib" if joblib and not readable else "pickle", source.size)
    if isinstance(source, Unpacked):
        out.nbytes = source.packed
        out.facts.append(("compression", source.kind))
    if readable and not first.broken:
        out.problems.add("plain-pickle", first.name, f"protocol {first.protocol}, holding {kind}")
    elif not readable:
        title = f"a plain pickle (protocol {first.protocol}, holding {kind}), not a torch checkpoint"
        fix = ("torch.load does not read it. Whoever wrote it used pickle.dump: ask for a file saved with torch.save.",)
        out.problems.append(Problem("not-a-checkpoint", title=title, fix=fix))
    out.problems += [problem for pickle in pickles for problem in pickle_problems(pickle, pickle.end)]
    if ends_like_zip(source):
        out.problems.add("zip-inside", detail="zipfile reads the archive at its end, pickle what is before it")
    if readable:
        tree = read_tree(first, StorageTable(lambda key, _: storages[key]))
        out.add_tree(*tree)
        out.records = tuple(record for record in storages.values() if record.method)
        for storage in tree.storages:
            if storage.stored < storage.nbytes:
                detail = f"{storage.stored} of {storage.nbytes} bytes are in the file; {needed_by(storage)}"
                out.problems.add("storage-cut", f"storage {storage.key}", detail)
    else:
        tree = find_tensors(root, StorageTable())
        out.add_tree(tree.tensors, (), tree.leaves, tree.problems)
    out.facts += [("pickle protocol", str(first.protocol)), ("top object", kind)]
    return out.checkpoint(pickles=tuple(pickles))


def _is_pickle(pickle: Pickle, size: int) -> bool:
    if not pickle.broken:
        return pickle.protocol >= 2 or pickle.end == size or bool(pickle.globals)
    acts = pickle.calls or pickle.extensions or pickle.raw or LOADER in pickle.globals
    return bool(acts) or (pickle.protocol >= 2 and bool(pickle.globals))


def _is_message_pack(pickle: Pickle, source: Source) -> bool:
    """Whether it is a MessagePack map, whose first byte is that of an opcode that names something by number.

    That must be all it does as a pickle.
    """
    if not (pickle.broken and pickle.extensions):
        return False
    acts = pickle.globals or pickle.calls or pickle.built or pickle.persistent or len(pickle.extensions) > 1
    from transload.formats.foreign import first_key

    return not acts and bool(first_key(source.read(0, 64)))


# -- storages in a pickle


class _EmbeddedData:
    """Reads the storages and arrays inside a pickle while a machine runs it.

    The bytes of a storage must be right before the call of ``LOADER``, and after the previous call: a pickler writes
    each storage once. So a file cannot make the same bytes into any number of storages.
    """

    def __init__(self, vm: PickleMachine, offset: int, storages: dict[str, Record]) -> None:
        self._vm = vm
        vm.read_storage, vm.read_array = self._storage, self._array
        self._offset = offset
        self._last_end = 0  # the end of the last call of LOADER
        self._head = MAGIC_PICKLE  # the first three pickles of the last stream: they are nearly always the same
        storages.clear()  # each run starts again, with more of the data
        self.storages = storages

    def _array(self, wrapper: Call) -> Any:
        """The array whose bytes follow; ``None`` unless ``wrapper`` is one of joblib that has its state."""
        vm, args = self._vm, wrapper.args
        kind: Any = wrapper.callee
        plain = wrapper.kind == "newobj" and args == ()
        if called(wrapper).endswith("._reconstructor") and type(args) is tuple and len(args) == 3:
            kind, plain = args[0], wrapper.kind == "reduce" and args[2] is None
        if type(kind) is not Global or (kind.module, kind.name) not in _WRAPPERS:
            return None
        states, calls = wrapper.states or [], vm.out.calls
        state: dict[Any, Any] = {}
        if len(states) == 1 and type(states[0]) is Dict and len(states[0].items) <= 2 * len(_WRAPPED | _OPTIONAL):
            state = {key: value for key, value in states[0].pairs() if type(key) is str}
            plain = plain and 2 * len(state) == len(states[0].items)
        shape, dtype, order = shape_of(state.get("shape")), dtype_of(state.get("dtype")), state.get("order")
        padded, mapped = state.get("numpy_array_alignment_bytes"), state.get("allow_mmap", False)
        place = next((at for at in range(1, min(len(calls), _MAX_CALLS) + 1) if calls[-at] is wrapper), 0)
        plain = plain and _WRAPPED <= state.keys() <= _WRAPPED | _OPTIONAL and order in ("C", "F")
        plain = plain and type(padded) in (int, type(None)) and type(mapped) is bool
        plain = plain and place > 0 and dotted(state["subclass"]).startswith("numpy.")
        if not plain or shape is None or dtype is None:
            raise Broken("an array that is not written as joblib writes it")
        if vm.pos < vm.frame_end:  # joblib would look for it after the frame
            vm.ambiguous("an array begins inside a frame")
        del calls[-place]
        begin, pickle = vm.pos, None
        if dtype.objects:  # another pickle follows
            pickle = run(vm.data, begin, vm.out.name)
            vm.pos = pickle.end
            vm.out.persistent += pickle.persistent
            vm.out.irregular += pickle.irregular
            vm.out.ambiguous += () if pickle.cut else pickle.ambiguous
            add_uses(vm.out, pickle)
            if pickle.broken:
                raise (Cut if pickle.cut else Broken)(pickle.broken)
        else:
            if padded is not None:
                vm.take(vm.take(1)[0])
            nbytes = prod(shape) * dtype.itemsize
            if nbytes > vm.size - vm.pos:
                raise Cut(f"an array of {nbytes} bytes is announced, {vm.size - vm.pos} are left")
            vm.pos += nbytes
        vm.out.raw.append((begin, vm.pos))
        if pickle is not None:
            return pickle.root
        data = bytearray(memoryview(vm.data)[vm.pos - nbytes : vm.pos])
        # As in protocol 5, which every reader of arrays knows.
        function = Global("numpy._core.numeric", "_frombuffer", begin)
        return Call(function, (data, state["dtype"], shape, order), "reduce", vm.pos)

    def _storage(self, args: Any, end: int) -> Persistent | None:
        """The storage in the arguments of a call whose opcode ends at ``end``; ``None`` if it is anything else."""
        node: Any = args[0] if type(args) is tuple and len(args) == 1 else None
        text = ""
        if type(node) is Call and called(node) == "_codecs.encode" and node.kind == "reduce":
            # ``_codecs.encode(text, "latin1")``, which pickles up to protocol 2 contain for bytes.
            changed = node.states or node.items or node.appended or node.kwargs
            match node.args:
                case (str(), "latin1") if not changed:
                    text = node.args[0]
        try:
            data: Any = text.encode("latin-1") if text else node
        except UnicodeEncodeError:
            return None
        stream = self._stream(data) if type(data) is bytes else None
        if stream is None:
            return None
        kind, tag, numel, start = stream
        for form in _TEXTS if text else (0,):
            method, raw = form, _TEXTS[form](text) if text else data
            if (at := self._vm.data.rfind(raw, max(self._last_end, end - len(raw) - _MAX_AFTER), end)) >= 0:
                break
        else:
            return None
        self._last_end, self._vm.pos = end, end
        if text and self._vm.out.calls[-1] is node:
            self._vm.out.calls.pop()  # the call that encodes the text
        key = str(len(self.storages))
        name, stored, place = f"storage {key}", max(0, len(data) - start), self._offset + at
        record = Record(name, None if text else place + start, stored, stored)
        if text and stored:
            before = len(_TEXTS[method](text[:start]))
            record = Record(name, place + before, stored, len(raw) - before, None, method)
        self.storages[key] = record
        storage = Persistent(("storage", self._vm.find(kind.module, kind.name), key, tag, numel), end)
        self._vm.out.persistent.append(storage)
        return storage

    def _stream(self, data: bytes) -> tuple[Global, str, int, int] | None:
        """Class, tag and element count of the only storage in a stream, and where its bytes begin.

        ``None`` for a stream of anything else. The last bytes may be missing.
        """
        if not data.startswith(MAGIC_PICKLE):
            return None
        position = len(self._head)
        if position == len(MAGIC_PICKLE) or not data.startswith(self._head):
            version = run(data, len(MAGIC_PICKLE))
            facts = run(data, version.end)
            if version.root != PROTOCOL or type(facts.root) is not Dict or not all(map(_is_plain, (version, facts))):
                return None
            position = facts.end
            self._head = data[:position]
        main = run(data, position)
        keys = run(data, main.end)
        pid: Any = main.root.id if type(main.root) is Persistent else None
        if type(pid) is not tuple or len(pid) != 6 or len(main.persistent) != 1 or not _is_plain(main, named=True):
            return None
        mark, kind, key, tag, numel, view = pid
        plain = mark == "storage" and type(key) is str and type(tag) is str and type(numel) is int and view is None
        if not plain or not _is_plain(keys) or keys.root != [key]:
            return None
        if type(kind) is not Global or list(main.globals.values()) != [kind] or kind.name not in STORAGES:
            return None
        nbytes, start = numel * ITEMSIZE[STORAGES[kind.name]], keys.end + 8
        count = int.from_bytes(data[keys.end : start], "little", signed=True)
        if not 0 <= nbytes < MAX_SIZE or len(data) > start + nbytes or (len(data) >= start and count != numel):
            return None
        return kind, tag, numel, start


def _is_plain(pickle: Pickle, *, named: bool = False) -> bool:
    """Whether a pickle is complete and calls nothing; only with ``named`` may it contain globals and ids."""
    notable = pickle.broken or pickle.irregular or pickle.ambiguous or pickle.calls or pickle.built or pickle.extensions
    return not notable and (named or not (pickle.globals or pickle.persistent))


def escaped(text: str) -> bytes:
    """A text as protocol 0 writes it."""
    for character in "\\\0\n\r\x1a":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("raw-unicode-escape")


_TEXTS: dict[int, Callable[[Any], bytes]] = {AS_TEXT: str.encode, AS_ESCAPED: escaped}


def _excuse(pickle: Pickle, storages: dict[str, Record]) -> None:
    """Remove ``LOADER`` and the wrapper of arrays from the globals of a pickle if each of their uses was read."""
    excused = {key: node for key, node in pickle.globals.items() if key == LOADER or key in _WRAPPERS}
    if pickle.raw:
        excused |= {key: node for key, node in pickle.globals.items() if key in _RECONSTRUCTING}
    # Every reader of a plain pickle fails at a persistent id, so all of them must be storages that were read here.
    if not excused or len(pickle.persistent) != len(storages) or pickle.ambiguous:
        return
    for node in walk_nodes([pickle.root, pickle.calls, *pickle.built]):
        if type(node) is Global:
            excused.pop((node.module, node.name), None)
    pickle.loader = excused.get(LOADER)
    pickle.wrapper = next((node for key, node in excused.items() if key in _WRAPPERS), None)
    for key in excused:
        del pickle.globals[key]


def _compare_readings(pickle: Pickle, source: Source, offset: int) -> None:
    """Note if the module ``pickle`` would import or call anything in the bytes of arrays, and add those uses."""
    if not pickle.raw:
        return
    begin, end = pickle.raw[0]
    other, _ = run_at(source, offset, pickle.name, _WINDOW, source.size)
    expected = {LOADER, *_WRAPPERS, *_RECONSTRUCTING, *pickle.globals}
    names = {key: node for key, node in other.globals.items() if key not in expected}
    calls = [call for call in other.calls if call.position > begin and type(call.callee) in (Global, Call)]
    if any(begin < call.position <= end for call in pickle.calls):
        # An array of objects is a separate pickle: read as part of this one, it would refer to other memo entries.
        pickle.globals |= names
        names, calls = {}, [call for call in calls if called(call) == ".".join(LOADER)]
    if names or calls or other.extensions or other.built:
        pickle.ambiguous.append((begin, "pickle would read the bytes of an array as opcodes"))
        add_uses(pickle, other)
    elif _WRAPPERS & pickle.globals.keys() and not pickle.broken:
        pickle.ambiguous.append((begin, "joblib would look for arrays where there may be none"))
