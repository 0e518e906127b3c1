"""The style sheet of the notebook view."""

from __future__ import annotations

__all__ = ["CSS"]

# Text takes the page's own colour and shades of it, so that any theme fits. Only the verdicts have colours of their
# own, of a lightness that reads on white and on black, brighter where a page says that it is dark.
CSS = """
.transload{--tl-good:#1a7f4b;--tl-trust:#9a6700;--tl-bad:#cf3b34;
--tl-dim:color-mix(in srgb,currentColor 62%,transparent);
--tl-line:color-mix(in srgb,currentColor 14%,transparent);--tl-tint:color-mix(in srgb,currentColor 5%,transparent);
color:var(--jp-content-font-color1,var(--vscode-editor-foreground,inherit));
font:13px/1.5 var(--jp-content-font-family,system-ui,-apple-system,"Segoe UI",sans-serif);max-width:880px}
body[data-jp-theme-light="false"] .transload,html[theme="dark"] .transload,html[data-theme="dark"] .transload,
body.vscode-dark .transload,body.vscode-high-contrast .transload,
body[data-theme="dark"] .transload{--tl-good:#4cc38a;--tl-trust:#e0a93b;--tl-bad:#ff7b72}
.transload .tl-plain{display:none}
.transload .tl-rich{display:block !important}
.transload .tl-head{display:flex;flex-wrap:wrap;gap:0 12px;align-items:baseline;font-size:14px;overflow-wrap:anywhere}
.transload .tl-dim{color:var(--tl-dim);font-weight:400}
.transload .tl-verdicts{display:flex;flex-wrap:wrap;gap:6px;margin:8px 0}
.transload .tl-badge{border:1px solid var(--tl-line);border-left:3px solid var(--tl-ink);border-radius:4px;
padding:1px 8px;
background:var(--tl-tint);overflow-wrap:anywhere}
.transload .tl-badge b{color:var(--tl-ink)}
.transload .tl-good{--tl-ink:var(--tl-good)}
.transload .tl-trust{--tl-ink:var(--tl-trust)}
.transload .tl-bad{--tl-ink:var(--tl-bad)}
.transload dl{display:grid;grid-template-columns:max-content 1fr;gap:1px 14px;margin:8px 0;padding:0}
.transload dt{color:var(--tl-dim);font-weight:400;margin:0;padding:0;float:none;width:auto}
.transload dd{margin:0;padding:0;overflow-wrap:anywhere}
.transload .tl-finding{border-left:3px solid var(--tl-ink,var(--tl-line));padding:2px 0 2px 10px;margin:8px 0;
overflow-wrap:anywhere;color:inherit}
.transload .tl-fix{font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace);font-size:12px;
white-space:pre-wrap;padding-left:18px;position:relative}
.transload .tl-fix::before{content:"\\2192";position:absolute;left:0;color:var(--tl-good)}
.transload summary{cursor:pointer}
.transload .tl-section{border-top:1px solid var(--tl-line);padding:4px 0;margin:0}
.transload .tl-section>summary{font-weight:600;padding:2px 0}
.transload .tl-bars{display:grid;grid-template-columns:max-content minmax(60px,280px) max-content max-content;
gap:2px 12px;
align-items:center;padding:2px 0 4px 16px;font-variant-numeric:tabular-nums}
.transload .tl-bars>span:nth-child(4n+3){text-align:right}
.transload .tl-bars>span:nth-child(4n){color:var(--tl-dim)}
.transload .tl-bar{height:8px;border-radius:4px;background:var(--tl-line);overflow:hidden}
.transload .tl-bar i{display:block;height:100%;border-radius:4px;
background:color-mix(in srgb,currentColor 55%,transparent)}
.transload .tl-tree{padding:2px 0 4px 0;overflow-x:auto}
.transload .tl-below{margin-left:6px;border-left:1px solid var(--tl-line);padding-left:12px}
.transload .tl-tree details>summary{display:block;list-style:none;position:relative}
.transload .tl-tree details>summary::-webkit-details-marker{display:none}
.transload .tl-tree summary>.tl-line::before{content:"\\25B8";position:absolute;left:3px;color:var(--tl-dim)}
.transload .tl-tree details[open]>summary>.tl-line::before{content:"\\25BE"}
.transload .tl-line{display:flex;gap:12px;padding:0 0 0 16px;font-variant-numeric:tabular-nums}
.transload .tl-line:hover{background:var(--tl-tint)}
.transload .tl-line>span{flex:0 0 110px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.transload .tl-line>span:nth-child(3){flex-basis:150px}
.transload .tl-line>span:last-child{flex-basis:70px;text-align:right}
.transload .tl-line>.tl-name{flex:1 1 220px;min-width:120px}
"""
