"""A branch's line to the store: what the branch did, written down with the version it stands at. Without a store, nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentkv.memory.draft import Draft
from agentkv.memory.ledger import Ledger
from agentkv.memory.saved import Settings, pack
from agentkv.memory.span import Prune, Record
from agentkv.types import Turn, Usage

if TYPE_CHECKING:
    from agentkv.memory.store import Overlay, SessionStore


class Journal:
    """nodes: the store's row of each committed turn."""

    def __init__(self, store: SessionStore | None, chain_id: str, version: int = 0, nodes: Sequence[int] = ()) -> None:
        self.store = store
        self.chain_id = chain_id
        self.version = version
        self.nodes = list(nodes)

    def _node(self, turn: int) -> int | None:
        return self.nodes[turn - 1] if turn else None

    def appended(self, records: Sequence[Record]) -> None:
        """Messages are about to be added."""
        if self.store is not None:
            self.version = self.store.append(self.chain_id, self.version, records)

    def committed(self, ledger: Ledger, draft: Draft, turn: Turn, usage: Usage, milliseconds: float) -> None:
        """A turn is about to be handed out."""
        if self.store is None:
            return
        from agentkv.memory.store import Commit

        commit = Commit(
            parent=self._node(ledger.number),
            turn=turn,
            ids=pack(draft.ids),
            base=ledger.length,
            tokens=ledger.length + len(draft.ids),
            placed=draft.placed,
            made=draft.made,
            usage=usage,
            milliseconds=milliseconds,
        )
        node, self.version = self.store.commit(self.chain_id, self.version, commit)
        self.nodes.append(node)

    def pruned(self, prunes: Sequence[Prune]) -> None:
        """Spans are about to be pruned in place."""
        if self.store is not None:
            self.version = self.store.add_prunes(self.chain_id, self.version, prunes)

    def marked(self, ledger: Ledger, settings: Settings | None = None) -> None:
        """Pins, lags, prunes of the ledger (a draft of what is to come) or the settings are about to change."""
        if self.store is not None:
            self.version = self.store.overlay(self.chain_id, self.version, _overlay(ledger), settings, ledger.length)

    def rolled_back(self, ledger: Ledger) -> None:
        """The branch is about to stand where this ledger (a draft of what is to come) stands."""
        if self.store is not None:
            head, old = self._node(ledger.number), self.nodes[-1] if self.nodes else None
            self.version = self.store.rollback(
                self.chain_id,
                self.version,
                head=head,
                old=old,
                turn=ledger.number,
                tokens=ledger.length,
                overlay=_overlay(ledger),
            )
        del self.nodes[ledger.number :]

    def forked(
        self, session_id: str, chain_id: str, tenant: str, ledger: Ledger, settings: Settings, *, pending: bool
    ) -> Journal:
        """The journal of a new branch that starts with this ledger."""
        nodes = self.nodes[: ledger.number]
        if self.store is None:
            return Journal(None, chain_id)
        version = self.store.fork(
            self.chain_id,
            session_id,
            chain_id,
            tenant,
            settings,
            head=self._node(ledger.number),
            turn=ledger.number,
            tokens=ledger.length,
            pending=pending,
            overlay=_overlay(ledger),
        )
        return Journal(self.store, chain_id, version, nodes)

    def closed(self) -> None:
        """The session is closed."""
        if self.store is not None:
            self.version = self.store.close_chain(self.chain_id, self.version)


def _overlay(ledger: Ledger) -> Overlay:
    from agentkv.memory.store import Overlay

    return Overlay(
        prunes=list(ledger.prunes.values()),
        pins=sorted(ledger.pins),
        was_due=sorted(ledger.was_due),
        lags=list(ledger.lags.items()),
    )
