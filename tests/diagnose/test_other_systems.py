"""What the doctor says on Windows and macOS speaks of nothing that only Linux has."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

from tests.diagnose.translated import translated

from transload.diagnose.case import exists_on
from transload.diagnose.report import Diagnosis, judge_machine, report
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import page
from transload.findings import Finding
from transload.render.lines import as_text

OF_LINUX = re.compile(
    r"libcuda|libnvidia|\blib\w+\.so|/dev/|/proc/|/etc/|/sys/|/usr/|/opt/|/lib/|docker|podman|nvidia-container|modprobe"
    r"|\bapt\b|\bdnf\b|\bpacman\b|\bsudo\b|as root|needs root|kernel module|kernel log|ldconfig|LD_[A-Z]|initramfs"
    r"|RAM disk|systemctl|systemd|dmesg|ulimit|\bgrep\b|\bexport \w+=|\bunset \w|SELinux|nouveau|your distribution|\brm -"
)


@cache
def diagnoses() -> list[Diagnosis]:
    """The diagnoses of all machines with Windows."""
    return [judge_machine(machine) for machine in translated()]


@cache
def findings_on_windows() -> dict[str, set[Finding]]:
    """Code → what is found on them."""
    found = defaultdict(set)
    for diagnosis in diagnoses():
        for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
            found[finding.code].add(finding)
    return found


def test_no_finding_on_windows_speaks_of_linux() -> None:
    wrong = {
        (code, text)
        for code, findings in findings_on_windows().items()
        for finding in findings
        for text in (finding.title, *finding.evidence, *finding.fix)
        if OF_LINUX.search(text)
    }
    assert wrong == set()
    assert len(findings_on_windows()) > 45


def test_no_report_on_windows_speaks_of_linux() -> None:
    texts = {line for diagnosis in diagnoses() for line in as_text(report(diagnosis)).splitlines()}
    assert {line for line in texts if OF_LINUX.search(line)} == set()


def test_no_page_of_a_cause_that_exists_on_windows_speaks_of_linux() -> None:
    pages = {code: page(code, "win32") for code in BY_CODE if exists_on("Windows", code)}
    said = {code: OF_LINUX.findall(text.partition("\n## Sources")[0]) for code, text in pages.items()}
    assert {code: words for code, words in said.items() if words} == {}
    assert "LD_LIBRARY_PATH" in page("U13", "linux")
    assert "System32" not in page("U13", "linux")
