"""What README, CONTRIBUTING and docs/ name exists: links, anchors, paths, names, targets, subcommands, folders."""

import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = ("rlq", "samplers", "trainers", "launch", "configs", "docs", "tests", "benchmarks", "requirements")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SUBCOMMANDS = {path.stem for path in (ROOT / "rlq/cli").glob("*.py")} - {"__init__", "main", "outcome"}
HISTORY = ("log.md",)  # entries name what existed on their day

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def spans(page: Path) -> list[str]:
    """Inline code of a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def commands(page: Path) -> list[str]:
    """Inline code, and lines of shell blocks."""
    blocks = [body for language, body in FENCE.findall(page.read_text()) if language == "bash"]
    return [*spans(page), *(line for block in blocks for line in block.splitlines())]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def exists(path: str, page: Path) -> bool:
    """True if a path or pattern means something, seen from the root, the page's folder or tests/."""
    homes = (ROOT, page.parent, ROOT / "tests")
    return any(next(home.glob(path.rstrip("/")), None) is not None for home in homes)


@functools.cache
def file_names() -> set[str]:
    return {path.name for top in TOP for path in (ROOT / top).rglob("*") if path.is_file()}


@pages
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), (
            f"{page.name} links to {link}; headings: {sorted(anchors(target))}"
        )


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: page.name)
def test_paths_exist(page):
    for span in spans(page):
        if not re.fullmatch(r"[\w./*-]+", span):
            continue
        # Metrics and presets of rlq begin with `rlq/` too, so there only names of files and folders count.
        ours = span.split("/")[0] in TOP and "/" in span and not re.fullmatch(r"rlq/.*[^/]", span)
        if ours or (span.endswith((".py", ".md")) and "/" in span):
            assert exists(span, page), f"{page.name} names {span}"
        elif span.endswith(".py"):
            assert span in file_names(), f"{page.name} names {span}"


@pages
def test_commands_name_files_that_exist(page):
    for line in commands(page):
        for path in re.findall(r"(?:python3?|--config|--script|ray job submit|bash) ([\w./-]+\.(?:py|yaml|sh))", line):
            assert exists(path, page), f"{page.name}: {line}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda page: page.name)
def test_dotted_names_resolve(page):
    for span in spans(page):
        if not re.fullmatch(r"(rlq|samplers|trainers)(\.[A-Za-z_]\w*)+", span) or span.endswith(".py"):
            continue
        module, found = span.split(".")[0], importlib.import_module(span.split(".")[0])
        for name in span.split(".")[1:]:
            module = f"{module}.{name}"
            try:
                found = getattr(found, name)
            except AttributeError:
                try:
                    found = importlib.import_module(module)
                except ImportError:
                    pytest.fail(f"{page.name} names {span}; there is no {module}")


@pages
def test_targets_and_subcommands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in commands(page):
        command = line.strip()
        if match := re.match(r"make ([a-z][a-z-]*)", command):
            assert match[1] in targets, f"{page.name}: {command}"
        if match := re.match(r"rlq ([a-z]+)", command):
            added = f"# rlq/cli/{match[1]}.py" in page.read_text()  # the worked example of a new one
            assert added or match[1] in SUBCOMMANDS, f"{page.name}: {command}"


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def test_the_script_in_the_readme_is_the_example():
    assert (ROOT / "docs/example.py").read_text() in blocks(ROOT / "README.md", "python")


def test_the_parts_in_the_readme_run():
    parts = blocks(ROOT / "README.md", "python")[-1]
    names: dict = {}
    exec(parts, names)
    assert names["out"].weights.shape == (2, 8)
    assert names["q"].shape == (256, 512)


def test_the_tree_in_the_readme_is_the_house():
    (tree,) = (body for body in blocks(ROOT / "README.md", "") if body.startswith("rlq/ "))
    drawn, top = set(), ""
    for line in tree.splitlines():
        name = line.split()[0].rstrip("/")
        top = top if line.startswith(" ") else name
        drawn.add(name if name == top else f"{top}/{name}")
    real = {
        str(path.parent.relative_to(ROOT))
        for package in ("rlq", "samplers", "trainers")
        for path in (ROOT / package).glob("*/__init__.py")
    }
    real |= {path.name for path in ROOT.iterdir() if path.name in TOP and path.name != "requirements"}
    assert drawn == real


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
