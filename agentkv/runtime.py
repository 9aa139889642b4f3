"""`Runtime`: one model, its engine and the store of its sessions. The composition root; nothing else joins the halves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from agentkv.errors import AgentkvError, BadRequest, Conflict, StoreFault, UnknownOption
from agentkv.memory.continuation import ContinuationIndex
from agentkv.memory.session import Session as MemorySession
from agentkv.memory.span import new_id
from agentkv.tools.registry import Toolbox
from agentkv.tools.run import ToolLoop
from agentkv.types import Policy, Sampling, SessionInfo, Turn, options_of

if TYPE_CHECKING:
    from agentkv.engine.accounts import EngineStats
    from agentkv.engine.sparse import SparseMethod
    from agentkv.memory.store import SessionStore

__all__ = ["DEFAULT", "Runtime", "Session", "default_db", "open_store"]


class _Default(Enum):
    DEFAULT = "the user's data folder"


DEFAULT = _Default.DEFAULT
"""`db=DEFAULT`: `agentkv.db` in the user's data folder, or in `AGENTKV_HOME` where that is set."""

Db = str | os.PathLike[str] | None | _Default


class Session(MemorySession, ToolLoop):
    """A session with the tool loop on top. toolbox: the functions that `run` may call."""

    def __init__(self, *args: Any, toolbox: Toolbox | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.toolbox = toolbox or Toolbox(self.tools)
        self._runtime: Runtime | None = None

    def standing_turn(self) -> Turn:
        """The last committed turn: the one whose calls are open."""
        return self.last_turn or super().standing_turn()

    @property
    def busy(self) -> bool:
        """Is a turn running now?"""
        return self.running

    @property
    def id(self) -> str:
        """Name of the session among its tenant's."""
        return super().id.removeprefix(_stored_id(self.tenant, ""))

    def fork(self, at: int | None = None, *, session_id: str | None = None) -> Self:
        """A child that shares everything up to turn `at`, or up to now. session_id: its name; Conflict where that is taken."""
        if session_id is not None and self._runtime is not None:
            self._runtime.check_new(session_id, self.tenant)
        return super().fork(at, session_id=_stored_id(self.tenant, session_id or new_id("s")))

    def _inherit(self, parent: Self) -> None:
        self.toolbox, self._runtime = parent.toolbox, parent._runtime
        if self._runtime is not None:
            self._runtime.adopt(self)

    def close(self) -> None:
        """Free its KV; a running turn is rolled back. The transcript stays in the store: `Runtime.resume` reopens it."""
        try:
            super().close()
        finally:
            if self._runtime is not None:
                self._runtime.forget(self)


class Runtime:
    """One model in this process, with sessions.

    model: 'micro', a Hugging Face directory or a .gguf file. method: an attention method, by name, as
    'name:option=value,...' or an instance; methods: others that sessions may have instead, in the same engine. device,
    dtype: 'auto' or a name. memory: bytes of the KV arena, or like '2GiB'; 'auto' is what weights and a measured step leave;
    None is 'auto' on a GPU, on a CPU a quarter of the memory, at most 1 GiB. db: None for no store, a path, a URL.
    window: most logical tokens of a session; None is the model's. page_size: slots of a KV page; None chooses. warm_memory:
    bytes of host memory for the KV of idle sessions, 0 for none; None: none on CPU, a quarter of what is free with a GPU.
    step_timeout: seconds after which a step is taken for lost and who waits gets EngineFault; None is 300. lookup: most
    tokens that a step may check for one session, the next one and guesses from its own text; 0 guesses nothing. Answers are
    the same either way, sampled ones too. threads: of the engine's work on a CPU; None is torch's number. graphs: on a GPU,
    decode steps are captured once and replayed. attention: whose kernel decodes rows that keep all: 'triton' (ours),
    'flashinfer' or 'auto', which is ours unless the other was measured to be faster on this GPU and is built.

    Raises UnknownModel, BadModel, UnknownOption, BadRequest and StoreFault. Not closing it leaks nothing past the process.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "micro",
        *,
        method: str | SparseMethod = "dense",
        methods: Iterable[str | SparseMethod] = (),
        device: str = "auto",
        dtype: str = "auto",
        memory: int | str | None = None,
        db: Db = DEFAULT,
        window: int | None = None,
        page_size: int | None = None,
        warm_memory: int | str | None = None,
        step_timeout: float | None = None,
        lookup: int = 8,
        threads: int | None = None,
        graphs: bool = True,
        attention: str = "auto",
    ) -> None:
        # OpenMP threads that spin while they wait make every step many times slower as soon as the cores are shared.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from agentkv.runtime_engine import open_engine

        self._store = None if db is None else open_store(db)
        try:
            self._engine = open_engine(
                os.fspath(model),
                method=method,
                methods=methods,
                device=device,
                dtype=dtype,
                memory=memory,
                window=window,
                page_size=page_size,
                warm_memory=warm_memory,
                step_timeout=step_timeout,
                lookup=lookup,
                threads=threads,
                graphs=graphs,
                attention=attention,
            )
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise
        self._live: dict[tuple[str, str], Session] = {}  # by tenant and id
        self._lock = threading.RLock()
        self._closed = False
        self.continuation = ContinuationIndex()

    def __repr__(self) -> str:
        return f"<Runtime {self.model_name} on {self.device}, {len(self._live)} sessions>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def model_name(self) -> str:
        """What the model was opened as."""
        return self._engine.backend.model_name

    @property
    def window(self) -> int:
        """Most logical tokens of a session."""
        return self._engine.backend.window

    @property
    def device(self) -> str:
        """Where the model is."""
        return self._engine.device

    @property
    def method(self) -> str:
        """Name of the attention method of sessions that name none."""
        return self._engine.method_name

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all that sessions may have."""
        return tuple(self._engine.backends)

    @property
    def attention(self) -> str:
        """Whose kernel decodes rows that keep all: 'triton' or 'flashinfer'."""
        return self._engine.config.attention

    # -- sessions

    def session(
        self,
        *,
        id: str | None = None,
        system: str | None = None,
        tools: Iterable[Any] = (),
        method: str | None = None,
        policy: Policy | Mapping[str, Any] | None = None,
        history: str = "as_generated",
        on_window: str = "rebuild",
        placeholder: str = "[pruned]",
        tenant: str = "",
        template_args: Mapping[str, Any] | None = None,
        kind: str = "session",
        **sampling: Any,
    ) -> Session:
        """A new session.

        method: one of `methods`, None the runtime's. tools: typed functions or OpenAI schemas. policy: a Policy or its fields.
        sampling: defaults of `generate`. placeholder: what a rebuild puts in a pruned body. tenant: whose it is; KV and
        sessions of one tenant are invisible to another. kind: 'chat' for those that the server makes for plain chat requests.
        """
        backend = self._engine.backends.get(self.method if method is None else method)
        if backend is None:
            raise BadRequest(
                f"method={method!r}: this runtime serves {', '.join(self.methods)}",
                hint="Open the runtime with methods=[...] that has it",
                param="method",
            )
        if kind not in ("session", "chat"):
            raise BadRequest(f"kind={kind!r}: 'session' or 'chat'", param="kind")
        toolbox = Toolbox(tools)
        with self._lock:
            if self._closed:
                raise self._gone()
            if id is not None:
                self.check_new(id, tenant)
            made = Session(
                backend,
                self._store,
                session_id=_stored_id(tenant, id or new_id("s")),
                system=system,
                tools=toolbox.schemas,
                policy=_policy(policy),
                history=history,
                on_window=on_window,
                placeholder=placeholder,
                sampling=_sampling(sampling),
                template_args=template_args,
                salt=tenant,
                tenant=tenant,
                toolbox=toolbox,
            )
            return self.adopt(made)

    def resume(self, id: str, *, tenant: str = "", tools: Iterable[Any] | None = None) -> Session:
        """The session of that id: the live one, or from the store. tools: its functions, which a store cannot keep."""
        toolbox = None if tools is None else Toolbox(tools)
        with self._lock:
            if self._closed:
                raise self._gone()
            found = self._fresh(self._live.get((tenant, _checked_id(id))))
            if found is None:
                if self._store is None:
                    raise _no_session(id)
                stored = _stored_id(tenant, id)
                engine = self._engine
                others = engine.backends.values()
                found = self.adopt(
                    Session.resume(engine.backend, self._store, stored, salt=tenant, tenant=tenant, others=others)
                )
            if toolbox is not None:
                found.toolbox = toolbox
            return found

    def _fresh(self, live: Session | None) -> Session | None:
        """The live session, unless the store has gone on without it (another process edited or deleted it): then none."""
        if live is None or live.running or not (live.closed or live.stale):
            return live
        self._discard(live)
        return None

    def _discard(self, live: Session) -> None:
        """Let go of a live session whatever the store says of it."""
        with suppress(AgentkvError):
            live.close()
        self.forget(live)

    def sessions(self, *, tenant: str = "") -> list[SessionInfo]:
        """All sessions of a tenant: those in the store, and the live ones that have none."""
        stored = self._store.list(tenant) if self._store is not None else []
        prefix = _stored_id(tenant, "")
        rows: dict[str, SessionInfo] = {info.id.removeprefix(prefix): info for info in stored}
        rows = {id: info.replace(id=id) for id, info in rows.items()}
        for live in self._live_ones():
            if live.tenant == tenant and (self._store is None or live.id in rows):
                info = live.info()
                known = rows.get(live.id)
                rows[live.id] = info if known is None else info.replace(created=known.created, updated=known.updated)
        return list(rows.values())

    def delete(self, id: str, *, tenant: str = "") -> None:
        """Close a session and remove its text."""
        with self._lock:
            live = self._live.get((tenant, _checked_id(id)))
            if live is not None:
                self._discard(live)
        if self._store is not None:
            self._store.delete(_stored_id(tenant, id), tenant=tenant)
        elif live is None:
            raise _no_session(id)
        self.continuation.forget(tenant, id)

    def check_new(self, id: str, tenant: str) -> None:
        """Refuse a name that is no name (BadRequest) or that a session of the tenant has (Conflict)."""
        taken = (tenant, _checked_id(id)) in self._live
        if not taken and self._store is not None:
            taken = self._store.known(_stored_id(tenant, id))
        if taken:
            raise Conflict(f"a session {id!r} exists", hint="Resume it, delete it, or take another id")

    def adopt(self, session: Session) -> Session:
        """Take a session (new, resumed or forked) among the live ones."""
        with self._lock:
            if self._closed:
                raise self._gone()
            session._runtime = self
            self._live[session.tenant, session.id] = session
        return session

    def forget(self, session: Session) -> None:
        """A session was closed."""
        with self._lock:
            if self._live.get((session.tenant, session.id)) is session:
                del self._live[session.tenant, session.id]

    def _gone(self) -> BadRequest:
        return BadRequest("the runtime is closed", hint="Open a new one and resume the session")

    def _live_ones(self) -> list[Session]:
        with self._lock:
            return list(self._live.values())

    # -- state

    def warm_up(self, rows: Iterable[int] = (1, 2, 4, 8, 16), tokens: int = 1024) -> list[dict[str, Any]]:
        """Read and decode prompts of so many tokens that nobody asked for, with so many rows at once, method by method: kernels
        are compiled (and kept on disk) and decode steps captured. What each took: method, rows, seconds. Nothing of them stays.
        """
        from agentkv.engine.warmup import warm_up

        counts = list(rows)
        for name, each in (*(("rows", each) for each in counts), ("tokens", tokens)):
            if isinstance(each, bool) or not isinstance(each, int) or each < 1:
                raise BadRequest(f"{name}={each!r}: 1 or more", param=name)
        worker, names = self._engine.worker, list(self._engine.backends)
        rounds = warm_up(worker.llm, counts, tokens)
        took = iter(lambda: worker.call(lambda: next(rounds, None)), None)
        return [{"method": names[form], "rows": count, "seconds": seconds} for form, count, seconds in took]

    def stats(self) -> dict[str, Any]:
        """Numbers of the engine. arena: bytes by holder, which add up to total. reserved_bytes: free bytes that running
        sequences may still take. peak_bytes: most arena bytes held at once so far. fragmented_bytes: by unit class, free
        but not to be had without moving units; moved_bytes: moved so far. warm: KV in host memory. queue: sequences by state.
        preempted: those that wait and have run before. preemptions, recomputed_tokens, deadline_misses: since the start.
        decoding: what steps without prompts made so far, and guesses of prompt lookup that were checked and that came true.
        graphs: decode steps that were captured, kept and replayed, seconds and bytes that this took, and what failed, by what
        it was captured for; None on a CPU.
        """
        llm, graphs = self._engine.worker.llm, self._engine.graphs

        def read() -> tuple[EngineStats, int, dict[str, Any], dict[str, Any] | None]:
            return llm.stats(), llm.peak_bytes, asdict(llm.decoding), None if graphs is None else asdict(graphs.stats())

        found, peak, decoding, captured = self._engine.worker.call(read)
        return {
            "arena": {name: size for name, size in found.bytes.items() if name != "reserved"},
            "reserved_bytes": found.bytes["reserved"],
            "peak_bytes": peak,
            "fragmented_bytes": found.fragmented,
            "moved_bytes": found.moved_bytes,
            "warm": {"bytes": found.warm_bytes, "demotions": found.demotions, "restores": found.restores},
            "queue": {"running": found.rows, "waiting": found.waiting, "finished": found.finished},
            "waiting_by_priority": dict(found.waiting_by_priority),
            "preempted": found.preempted,
            "preemptions": found.tally.preemptions,
            "recomputed_tokens": found.tally.recomputed,
            "deadline_misses": found.tally.deadline_misses,
            "decoding": decoding,
            "graphs": captured,
            "sessions": len(self._live),
            "prefill_tokens_per_second": round(self._engine.backend.prefill_rate(), 1),
        }

    def check(self) -> None:
        """Integrity of every memory account; raises AssertionError or EngineFault where one is wrong."""
        self._engine.worker.call(self._engine.worker.llm.check)

    def ready(self) -> bool:
        """Do tokens progress while work is queued?"""
        return self.trouble() is None

    def trouble(self) -> str | None:
        """Why tokens do not progress while work is queued, None when they do. Never waits for the engine."""
        return "the runtime is closed" if self._closed else self._engine.worker.trouble

    def close(self) -> None:
        """Suspend what is open and stop the engine; running turns are rolled back. Twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for live in self._live_ones():
            with suppress(Exception):
                live.cancel()
        self._engine.worker.close()
        if self._store is not None:
            self._store.close()


def default_db() -> Path:
    """Where sessions are kept unless you say otherwise; its folder is made. StoreFault where it cannot be."""
    from platformdirs import user_data_path

    home = os.environ.get("AGENTKV_HOME")
    folder = Path(home) if home else user_data_path("agentkv")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "Set AGENTKV_HOME to a folder that can be written, give db=, or do without a store: db=None"
        raise StoreFault(f"sessions cannot be kept in {folder}: {error}", hint=hint) from None
    return folder / "agentkv.db"


def open_store(db: str | os.PathLike[str] | _Default = DEFAULT) -> SessionStore:
    """The store at a path or URL, migrated to this version. Raises StoreFault."""
    from agentkv.memory.store import SessionStore

    return SessionStore(default_db() if isinstance(db, _Default) else db)


def transcript(store: SessionStore, session_id: str) -> list[dict[str, Any]]:
    """A stored session's messages in OpenAI's form; no model is needed."""
    from agentkv.memory.restore import restored
    from agentkv.memory.transcript import openai_message

    saved = store.load(session_id)
    head = [] if saved.settings.system is None else [{"role": "system", "content": saved.settings.system}]
    return head + [openai_message(message) for message in restored(saved).messages]


def list_methods() -> list[dict[str, Any]]:
    """Every attention method, as `agentkv methods` shows it."""
    from agentkv import runtime_methods

    return runtime_methods.list_methods()


def _stored_id(tenant: str, id: str) -> str:
    """The name a store knows a session by: names are each tenant's own."""
    return f"{tenant}/{id}" if tenant else id


def _checked_id(id: str) -> str:
    if not (isinstance(id, str) and 0 < len(id) <= 200 and id.isprintable() and "/" not in id):
        raise BadRequest(f"id={id!r}: 1 to 200 printable characters, no slash", param="id")
    return id


def _policy(given: Policy | Mapping[str, Any] | None) -> Policy | None:
    if given is None or isinstance(given, Policy):
        return given
    made: Policy = options_of(Policy, given, "policy")
    return made


def _sampling(given: dict[str, Any]) -> Sampling:
    if isinstance(given.get("stop"), str):
        given = {**given, "stop": (given["stop"],)}
    known = {field.name for field in msgspec.structs.fields(Sampling)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UnknownOption(
            f"session: unknown option {unknown[0]!r}", hint=f"Sampling: {', '.join(sorted(known))}", param=unknown[0]
        )
    made: Sampling = options_of(Sampling, {name: value for name, value in given.items() if value is not None}, "session")
    return made


def _no_session(id: str) -> BadRequest:
    return BadRequest(f"no session {id!r}", hint="List them with Runtime.sessions() or `agentkv sessions ls`")
