"""The text that the demo's language model is trained on: two books whose copyright has expired.

    King James Version of the Bible (1611)             Debian's bible-kjv-text, printed by bible-kjv
    The Devil's Dictionary, Ambrose Bierce (1911)      Debian's dict-devil

They are fetched with `apt-get download` and unpacked beside; nothing is installed, and nothing of the
packages is shipped. The program bible-kjv, which is GPL-2+, is run to print the text. Within the United
Kingdom the King James Version is printed under letters patent of the Crown.
"""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

PACKAGES = ("bible-kjv-text", "bible-kjv", "dict-devil")
BOOKS = """
Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1Samuel 2Samuel 1Kings 2Kings
1Chronicles 2Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes Song Isaiah Jeremiah
Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah Haggai
Zechariah Malachi Matthew Mark Luke John Acts Romans 1Corinthians 2Corinthians Galatians Ephesians
Philippians Colossians 1Thessalonians 2Thessalonians 1Timothy 2Timothy Titus Philemon Hebrews James
1Peter 2Peter 1John 2John 3John Jude Revelation
""".split()  # noqa: SIM905
CHAPTERS = 1189
LEAST_ENTRY = 40
# Entries of 1911 on peoples that a demo should not repeat: those with one of these words are left out.
SKIP = re.compile(
    r"\b(n[ei]g[gr]\w*|jew|jews|jewish|hebrew|savage\w*|indian\w*|mulatto|african\w*|mongolian)\b", re.I
)
VERSE = re.compile(r"([1-3]?[A-Za-z]+)(\d+):(\d+) (.+)")
HEAD = re.compile(r"[A-Z][A-Z'\- ]+, ?(n|v|adj|adv|pp|p|x|interj)\b")
OTHER_HEAD = re.compile(r"[A-Z][A-Z'\- ]{2,}, ")
HEAD_WORD = re.compile(r"[A-Z][A-Z'\- ]{2,}|[A-Za-z'\- ]{2,30}")


def fetch(work: Path) -> None:
    """The packages, unpacked under `work`."""
    work.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        place = work / package
        if not place.exists():
            subprocess.run(["apt-get", "download", package], cwd=work, check=True, stderr=subprocess.DEVNULL)
            (archive,) = work.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", str(archive), str(place)], check=True)


def read_chapters(work: Path) -> list[list[str]]:
    """A list for each chapter: its heading, then its verses."""
    command = [str(work / "bible-kjv/usr/bin/bible"), "-f", "-p", str(work / "bible-kjv-text/usr/lib")]
    printed = subprocess.run(command, input="gen1:1-rev22:21\n", capture_output=True, text=True, check=True)
    chapters: list[list[str]] = []
    last, book = ("", 0), -1
    for line in printed.stdout.splitlines():
        found = VERSE.fullmatch(line)
        if found is None:
            continue  # a prompt, or help
        short, chapter, verse, text = found[1], int(found[2]), int(found[3]), found[4].strip()
        if (short, chapter) != last:
            book += short != last[0]
            last = short, chapter
            chapters.append([re.sub(r"^([1-3])", r"\1 ", BOOKS[book]) + f" {chapter}"])
        if len(chapters[-1]) == verse:  # the first of all is printed twice
            chapters[-1].append(text)
    if book != len(BOOKS) - 1 or len(chapters) != CHAPTERS:
        raise RuntimeError(f"{book + 1} books and {len(chapters)} chapters were read")
    return chapters


def read_entries(work: Path) -> list[str]:
    """The entries of the dictionary, a paragraph a line."""
    with gzip.open(work / "dict-devil/usr/share/dictd/devil.dict.dz", "rt", encoding="utf-8") as file:
        text = file.read()
    text = text[text.index("MORE DEFINITIONS" if "MORE DEFINITIONS" in text else "ABASEMENT") :]
    entries: list[list[str]] = []
    for line in text.splitlines():
        if HEAD.match(line.strip()) or OTHER_HEAD.match(line):
            entries.append([line.strip()])
        elif entries and not HEAD_WORD.fullmatch(line):  # dictd has the head word before each entry
            entries[-1].append(line.rstrip())
    joined = [_join(re.split(r"\n\s*\n", "\n".join(lines).strip())) for lines in entries]
    return [entry for entry in joined if len(entry) > LEAST_ENTRY and not SKIP.search(entry)]


def _join(paragraphs: list[str]) -> str:
    """Prose loses its line ends; verse, which is indented, its indentation."""
    lines = []
    for paragraph in paragraphs:
        if re.search(r"\n {6,}", paragraph):
            lines += [line.strip() for line in paragraph.splitlines()]
        elif paragraph.strip():
            lines.append(re.sub(r"\s*\n\s*", " ", paragraph).strip())
    return "\n".join(lines)
