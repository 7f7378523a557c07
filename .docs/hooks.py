"""Add pages to the site that are not files under notebooks/: the README, a page per public name, and live pages.

Convert formulas to MathML, so that no page fetches a script to show them. Fail the build if a page has a link without
a target, or fetches a script or a style from elsewhere.
"""

import contextlib
import io
import json
import os
import re
import sys
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
import tomllib
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# The site documents this checkout, whether gbfunc is installed or not.
sys.path.insert(0, str(ROOT))

import gbfunc as gb  # noqa: E402
from gbfunc.cli.parser import COMMANDS, parse  # noqa: E402
from gbfunc.exporting import page as browser  # noqa: E402

# The index of the reference: every public name once, and the classes of objects that public functions take or return.
GROUPS = {
    "Plan": "make_plan Plan register",
    "Types of g-net": "periodic bilinear gnet stochastic low_rank xox constant new_rows from_module",
    "Codes of rows and columns": "binary gray grid one_hot per_axis table",
    "Train": "make_train_step distillation allocate_steps TrainState torch_optimizer torch_schedule population "
    "update_alignment",
    "Genomes and their weights": "Genome init_genome generate materialize carry_over shuffled fit_genome flatten "
    "sample_noise",
    "Files": "save load load_metadata export Checkpointer load_checkpoint",
    "Adapters and modules": "GenomeModule materialize_many merge_genomes save_lora",
    "Many ranks": "mesh plan_parallel",
    "Classes of arguments and results": "train.options.StepOptions formats.Steps train.step.TrainStep "
    "train.step.StepInfo train.optimizers.Optimizer train.population.Population train.alignment.UpdateAlignment "
    "fit.Fit many.ManyGenomes storage.checkpoint.Checkpoint exporting.Exported "
    "parallel.Mesh parallel.CollectiveError parallel.planner.DeviceSpec parallel.planner.ParallelPlan "
    "parallel.styles.tensor_styles parallel.styles.pad_vocabulary",
    "Tasks": "tasks.find_task tasks.Task tasks.Recipe tasks.Split tasks.accuracy",
    "For your own types": "hypernets.Hypernet hypernets.Sized hypernets.Leaf hypernets.Factors encoding.Encoding",
    # Evolution comes last, because only these names need an extra.
    "Evolution": "evolution.GenomeProblem evolution.ControlProblem",
}
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
GLOSSARY = (ROOT / "notebooks" / "guides" / "glossary.md").read_text(encoding="utf-8").replace("`", "")
TERMS = {term: re.findall(rf"\*\*{term}\*\*.*\n: (.*?)\.(?:\s|$)", GLOSSARY)[0] for term in ("p-net", "g-net")}
"""First sentence of the glossary for each term."""
BOOSTS = {"guides/shrink.md": 12, "guides/command_line.md": 12, "guides": 4, "results": 0.5}
"""Factors on the scores of pages in the search."""
NAMES = [name for group in GROUPS.values() for name in group.split()]


class Doctests(griffe.Extension):
    """Put fences around doctests, which Markdown would show as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Fence each paragraph of a docstring that begins with `>>>`."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"(?:\A|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", r"```pycon\n\1\n```", text, flags=re.S
            )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link the repository, and add the pages of the reference to the navigation."""
    config.repo_url = URLS["Repository"].removesuffix(".git")
    config.repo_name = "Repository"
    pages = [{title: [{n.split(".")[-1]: page_of(n)} for n in group.split()]} for title, group in GROUPS.items()]
    entry = next(entry for entry in config.nav or [] if "Reference" in entry)
    entry["Reference"] = [entry["Reference"], *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    if odd := set(gb.__all__) ^ {name for name in NAMES if "." not in name}:
        raise PluginError(f"GROUPS in .docs/hooks.py must equal gbfunc.__all__; add or remove {sorted(odd)}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    # Links in the README start at the root of the repository. The root of the site is notebooks/.
    made = {"index.md": readme.replace("](notebooks/", "]("), "reference/index.md": reference_index()}
    made["guides/command_line.md"] = command_line()
    made |= {page_of(name): reference_page(name) for name in NAMES}
    grown = ROOT / "notebooks" / "pages"
    alphabets = json.loads((grown / "alphabets.json").read_text(encoding="utf-8"))
    made |= {f"pages/{path.stem}.html": browser.page(path.read_bytes(), alphabets) for path in grown.glob("*.genome")}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for name in ("style.css", "search.js"):
        files.append(File.generated(config, name, abs_src_path=str(Path(__file__).with_name(name))))
    return files


def command_line() -> str:
    """Return the help of every command, as the parser writes it."""
    os.environ["COLUMNS"] = "88"
    about = "The output of `gbfunc COMMAND --help` for each command. `gbfunc --version` prints the version."
    lines = ["# The command line", "", about]
    for name in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parse([name, "--help"])
        lines += ["", f"## gbfunc {name}", "", "```text", text.getvalue().rstrip(), "```"]
    return "\n".join(lines)


def page_of(name: str) -> str:
    """`train.StepInfo` -> `reference/StepInfo.md`."""
    return f"reference/{name.split('.')[-1]}.md"


def reference_index() -> str:
    """Return the index of the reference: all names, in groups by purpose."""
    lines = [
        "# Reference",
        "",
        "A name without a dot, such as `make_plan`, is an attribute of `gb` after `import gbfunc as gb`. A name with a "
        "dot, such as `tasks.Task`, is in a module of `gbfunc`: `from gbfunc.tasks import Task`.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}", "", "| name | description |", "|---|---|"]
        for name in group.split():
            first = (find(name).__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("|", r"\|")
            lines.append(f"| [`{name}`]({name.split('.')[-1]}.md) | {first} |")
    return "\n".join(lines)


def find(name: str) -> Any:
    """Return the object `gbfunc.NAME`."""
    room, _, last = name.rpartition(".")
    return getattr(import_module(f"gbfunc.{room}" if room else "gbfunc"), last)


def reference_page(name: str) -> str:
    """Return the page of a class or function, with the name that users write as the title."""
    thing, last = find(name), name.split(".")[-1]
    heading = f"gbfunc.{name}" if "." in name else f"gb.{name}"
    options = f"    options:\n      heading: {heading}\n      toc_label: {last}\n"
    if last.islower():
        # Types of g-net and codes are classes that users call, so the page shows the arguments and no members.
        options += "      members: false\n      show_bases: false\n      show_labels: false\n"
    return f"---\ntitle: {last}\n---\n\n::: {thing.__module__}.{thing.__qualname__}\n{options}"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Insert the repository's address, keep a number and its deviation on one line, and rank guides above results."""
    path = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(path) or BOOSTS.get(path.split("/")[0], 1)}
    markdown = re.sub(r"± \d+\.\d+( %)?", lambda spread: spread[0].replace(" ", "\N{NO-BREAK SPACE}"), markdown)
    if path != "guides/glossary.md" and not path.endswith(".ipynb"):
        # Show the meaning of a term when the pointer is on the term.
        markdown += "\n\n" + "\n".join(f"*[{term}{s}]: {TERMS[term]}" for term in TERMS for s in ("", "s"))
    return markdown.replace("GBFUNC_REPOSITORY", URLS["Repository"])


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Convert formulas of pages (marked by arithmatex) and of notebooks (between dollars), and the remaining links."""
    html = re.sub(r"<table>.*?</table>", _labelled, html, flags=re.S)
    html = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', _formula, html, flags=re.S)
    if page.file.src_uri.endswith(".ipynb"):
        text = r"(?<=jp-RenderedMarkdown jp-MarkdownOutput).*?</div>"
        html = re.sub(text, lambda cell: re.sub(r"\$([^$<>]+)\$", _formula, cell[0]), html, flags=re.S)
        return re.sub(r'(href="(?!\w+:)[^"#]*)\.md(?=["#])', r"\1.html", html)
    if (up := {"index.md": "", "guides": "../"}.get(page.file.src_uri.split("/")[0])) is not None:
        html = re.sub(r"(?<!>)<code>(gb\.)?(\w+)</code>", lambda code: _reference(code, f"{up}reference/"), html)
    if page.file.src_uri.startswith("reference/"):
        own = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
        known = "|".join(last for last in (name.split(".")[-1] for name in NAMES) if last != own)
        html = re.sub(rf"(?<!>)<code>((?:gb\.)?({known}))</code>", r'<a href="\2.html"><code>\1</code></a>', html)
        if own in gb.__all__ and (behind := find(own).__name__) != own:
            html = html.replace(f">{behind}<", f">{own}<", 1)
    return html


def _reference(code: re.Match[str], folder: str) -> str:
    """Link a class, or `gb.NAME`, to its page. Lower-case names without `gb.` often mean something different."""
    public = code[2] in {name.split(".")[-1] for name in NAMES} and (code[1] or code[2][0].isupper())
    return f'<a href="{folder}{code[2]}.html">{code[0]}</a>' if public else code[0]


def _labelled(table: re.Match[str]) -> str:
    """Give each cell of a table the name of its column, which a phone shows beside the cell."""
    found = re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.S)
    names = [re.sub(r"<[^>]+>", "", name).replace('"', "&quot;") for name in found]

    def labelled(row: re.Match[str]) -> str:
        rest = iter(names)
        return re.sub(r"<td\b", lambda _: f'<td data-label="{next(rest, "")}"', row[0])

    return re.sub(r"<tr>.*?</tr>", labelled, table[0], flags=re.S)


def _formula(found: re.Match[str]) -> str:
    return convert(unescape(found[1]))


def on_post_build(config: MkDocsConfig) -> None:
    """Check every link of the built pages, including notebooks and the reference."""
    site = Path(config.site_dir)
    # Skip live pages: their scripts have links in strings, and the tests check these pages.
    found = (path for path in site.rglob("*.html") if path.parent != site / "pages")
    pages = {path: path.read_text(encoding="utf-8") for path in found}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', html)) for path, html in pages.items()}
    dead = []
    for path, html in pages.items():
        for tag, link in re.findall(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"', html):
            url = urlsplit(unescape(link))
            if url.scheme or url.netloc:
                if tag != "a" and url.scheme != "data":
                    dead.append(f"{path.relative_to(site)} fetches {link}")
                continue
            # Only 404.html has links from the root of the site, whose address is not known here.
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not url.path.startswith("/") and not target.exists():
                dead.append(f"{path.relative_to(site)}: no {link}")
            elif url.fragment and target in anchors and unquote(url.fragment) not in anchors[target]:
                dead.append(f"{path.relative_to(site)}: no anchor {link}")
    if dead:
        raise PluginError("\n".join(["links without a target, and scripts or styles from elsewhere:", *dead]))
