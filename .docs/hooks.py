"""Pages that are no files under notebooks/: the README as the start, reference of each public name, genomes that grow.

Formulas become MathML, so that no page fetches a script to show them; a built page that leads nowhere, or to a script
or style elsewhere, fails the build.
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

# The reference's list, in which each public name stands once, and what users meet without writing its name.
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
    "What these take and return": "train.options.StepOptions formats.Steps train.step.TrainStep train.step.StepInfo "
    "train.optimizers.Optimizer train.population.Population train.alignment.UpdateAlignment "
    "fit.Fit many.ManyGenomes storage.checkpoint.Checkpoint exporting.Exported "
    "parallel.Mesh parallel.CollectiveError parallel.planner.DeviceSpec parallel.planner.ParallelPlan "
    "parallel.styles.tensor_styles parallel.styles.pad_vocabulary",
    "Tasks": "tasks.find_task tasks.Task tasks.Recipe tasks.Split tasks.accuracy",
    "To make your own": "hypernets.Hypernet hypernets.Sized hypernets.Leaf hypernets.Factors encoding.Encoding",
    # Last: these alone need an extra.
    "Evolution": "evolution.GenomeProblem evolution.ControlProblem",
}
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
GLOSSARY = (ROOT / "notebooks" / "guides" / "glossary.md").read_text(encoding="utf-8").replace("`", "")
TERMS = {term: re.findall(rf"\*\*{term}\*\*.*\n: (.*?)\.(?:\s|$)", GLOSSARY)[0] for term in ("p-net", "g-net")}
"""First sentence of the glossary for each term."""
BOOSTS = {"guides/shrink.md": 12, "guides/command_line.md": 12, "guides": 4, "results": 0.5}
"""What the score of a page in the search is multiplied by."""
NAMES = [name for group in GROUPS.values() for name in group.split()]


class Doctests(griffe.Extension):
    """Fences around doctests, which otherwise read as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Fence each paragraph of a docstring that begins with `>>>`."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"(?:\A|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", r"```pycon\n\1\n```", text, flags=re.S
            )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link the repository, and put the reference's pages into the navigation."""
    config.repo_url = URLS["Repository"].removesuffix(".git")
    config.repo_name = "Repository"
    pages = [{title: [{n.split(".")[-1]: page_of(n)} for n in group.split()]} for title, group in GROUPS.items()]
    entry = next(entry for entry in config.nav or [] if "Reference" in entry)
    entry["Reference"] = [entry["Reference"], *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    if odd := set(gb.__all__) ^ {name for name in NAMES if "." not in name}:
        raise PluginError(f"GROUPS in .docs/hooks.py must hold each name of gbfunc.__all__; see to {sorted(odd)}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    # Its links are from the root of the repository; of the site that is notebooks/.
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
    lines = ["# The command line", "", "`gbfunc COMMAND --help` prints the same; `gbfunc --version`, the version."]
    for name in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parse([name, "--help"])
        lines += ["", f"## gbfunc {name}", "", "```text", text.getvalue().rstrip(), "```"]
    return "\n".join(lines)


def page_of(name: str) -> str:
    """`train.StepInfo` -> `reference/StepInfo.md`."""
    return f"reference/{name.split('.')[-1]}.md"


def reference_index() -> str:
    """All names, by what they are for."""
    lines = [
        "# Reference",
        "",
        "Names without a dot are `gb.NAME` after `import gbfunc as gb`, the others `gbfunc.ROOM.NAME`.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}", "", "| name | what it is |", "|---|---|"]
        for name in group.split():
            first = (find(name).__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("|", r"\|")
            lines.append(f"| [`{name}`]({name.split('.')[-1]}.md) | {first} |")
    return "\n".join(lines)


def find(name: str) -> Any:
    """What `gbfunc.NAME` is."""
    room, _, last = name.rpartition(".")
    return getattr(import_module(f"gbfunc.{room}" if room else "gbfunc"), last)


def reference_page(name: str) -> str:
    """The page of a name: the class or function behind it, under the name that users write."""
    thing, last = find(name), name.split(".")[-1]
    heading = f"gbfunc.{name}" if "." in name else f"gb.{name}"
    options = f"    options:\n      heading: {heading}\n      toc_label: {last}\n"
    if last.islower():
        # Of types and codes, which are classes that users call, the arguments are what counts.
        options += "      members: false\n      show_bases: false\n      show_labels: false\n"
    return f"---\ntitle: {last}\n---\n\n::: {thing.__module__}.{thing.__qualname__}\n{options}"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Name the repository's address, keep figures on one line, and rank guides above notebooks and results."""
    path = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(path) or BOOSTS.get(path.split("/")[0], 1)}
    markdown = re.sub(r"± \d+\.\d+( %)?", lambda spread: spread[0].replace(" ", "\N{NO-BREAK SPACE}"), markdown)
    if path != "guides/glossary.md" and not path.endswith(".ipynb"):
        # Terms of the field's own show their meaning under the pointer.
        markdown += "\n\n" + "\n".join(f"*[{term}{s}]: {TERMS[term]}" for term in TERMS for s in ("", "s"))
    return markdown.replace("GBFUNC_REPOSITORY", URLS["Repository"])


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Formulas, of pages as arithmatex marks them and of notebooks' text between dollars; links that MkDocs leaves."""
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
    """Link a class, or a name as `gb.NAME`, to its page: `load` or `table` alone is often another thing."""
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
    """Check every link of the built pages, notebooks' and the reference's too."""
    site = Path(config.site_dir)
    # Not those that grow a genome, whose script has links in its strings: they have tests of their own.
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
            # 404.html alone has links from the root, wherever that will be.
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not url.path.startswith("/") and not target.exists():
                dead.append(f"{path.relative_to(site)}: no {link}")
            elif url.fragment and target in anchors and unquote(url.fragment) not in anchors[target]:
                dead.append(f"{path.relative_to(site)}: no anchor {link}")
    if dead:
        raise PluginError("\n".join(["built pages with links that lead nowhere or fetch what is elsewhere:", *dead]))
