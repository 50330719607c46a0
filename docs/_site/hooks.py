"""What `mkdocs.yml` cannot say: the list of notes in the navigation, the style sheet, and links
that lead out of the site. `mkdocs.yml` names this file.
"""

import os
import pathlib
import re

from mkdocs.structure.files import File


def on_config(config):
    """Lists the notes in the navigation, by what stands before the colon of their headings."""
    listed = []
    for note in sorted((pathlib.Path(config["docs_dir"]) / "notes").glob("*.md")):
        heading = note.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        listed.append({heading.partition(":")[0]: f"notes/{note.name}"})
    config["nav"].append({"Notes": listed})
    return config


def on_files(files, config):
    """Adds the style sheet."""
    style = pathlib.Path(__file__).with_name("site.css").read_text(encoding="utf-8")
    files.append(File.generated(config, "site.css", content=style))
    return files


def on_page_markdown(markdown, page, config, files):
    """Keeps only the text of a link whose target is no file of the site, such as a file of the code
    or a folder. `tests/test_docs.py` checks that these targets exist in the repository.
    """
    folder = pathlib.PurePosixPath(page.file.src_uri).parent

    def without_link(match):
        path, _, _ = match[2].partition("#")
        target = os.path.normpath(folder / path) if path else page.file.src_uri
        return match[0] if files.get_file_from_path(target) else match[1]

    return re.sub(r"\[([^\]\n]+)\]\((?![a-z]+:)([^)\s]+)\)", without_link, markdown)
