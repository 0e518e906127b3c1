"""What results look like: as text, as JSON, in a notebook and in a browser."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from transload.render.lines import Block

__all__ = ["Reported"]


class Reported:
    """A base class for results that have a report: as text, in a notebook, and as a page for a browser."""

    def _blocks(self) -> Iterable[Block]:
        raise NotImplementedError

    def _page_blocks(self) -> Iterable[Block]:
        """The report for a notebook or a browser, if it has pictures or another order."""
        return self._blocks()

    def __str__(self) -> str:
        """The report as the command line prints it, without colour."""
        from transload.render.lines import as_text

        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        from transload.render.html import notebook_view

        return "".join(notebook_view(self._page_blocks(), str(self)))

    def to_html(self) -> str:
        """The report as ``--html`` writes it: one page for a browser, which needs no network."""
        from transload.render.html_report import page_of

        return "".join(page_of(self._page_blocks()))
