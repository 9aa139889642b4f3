"""The safe tool: equal to the real commands, and nothing leaves its directory."""

import os
import subprocess
from pathlib import Path

import pytest

from agentkv.world.env import World
from agentkv.world.programs import Once
from agentkv.world.shell import Shell
from agentkv.world.simulator import CAP, Simulator
from agentkv.world.task import make_task

FILES = {"a.txt": "one 1\ntwo 2\n\nthree 3\n", "b.txt": "no newline", "d/e.txt": "deep\n", "empty.txt": ""}
FILES["a.b"] = "a.b\naxb\n"
LINES = [
    "ls", "ls .", "ls d", "ls a.txt", "ls nope", "ls a.txt/x", "cat a.txt", "cat a.txt b.txt", "cat nope a.txt", "cat d",
    "cat a.txt/x", "cat d/e.txt", "cat empty.txt", "head a.txt", "head -n 2 a.txt",
    "head -n 1 b.txt", "head nope", "head d",
    "grep two a.txt", "grep ^t a.txt", "grep '3$' a.txt", "grep zzz a.txt",
    "grep a.b a.b", "grep '^two 2$' a.txt", "grep x nope",
    "grep e d", "grep no b.txt", "grep ^ a.txt", "grep '$' empty.txt",
    "sed -i 's/^two 2$/two 22/' a.txt", "sed -i 's/^no newline$/new/' b.txt", "sed -i 's/^$/filled/' a.txt",
    "sed -i 's/^$/x/' empty.txt", "sed -i 's/^x$/y/' nope", "sed -i 's/^x$/y/' d", "sed -i 's/^deep$//' d/e.txt",
    "echo hello  'two  words' > c.txt", "echo > c.txt", "echo x > a.txt", "echo hi", "echo a'b'c",
]  # fmt: skip


def make(folder: Path) -> None:
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("line", LINES)
def test_equal_to_a_real_shell(tmp_path, line):
    """The oracle is /bin/sh with the same line; then the shell tool; then the simulator."""
    for name in ("real", "tool"):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    real = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path / "real",
        env={"LC_ALL": "C", "PATH": os.defpath},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert Shell(tmp_path / "tool", {}).run(line) == (real.stdout, real.returncode)
    assert tree(tmp_path / "tool") == tree(tmp_path / "real")
    twin = Simulator(FILES, {})
    make(tmp_path / "real")
    assert twin.run(line) == Shell(tmp_path / "real", {}).run(line)
    assert twin.files == tree(tmp_path / "real")


ESCAPES = [
    "", " ", "cat ../../etc/passwd", "cat /etc/passwd", "cat d/../../x", "cat ..", "cat .", "cat -", "cat --help", "cat ~/x",
    "echo x > ../y", "echo x > /tmp/agentkv-escape", "echo x >> a.txt", "echo x > a.txt > b.txt", "echo x > ", "> a.txt",
    "cat a.txt; id", "cat a.txt | sh", "cat a.txt && id", "cat $(id)", "cat `id`", "cat $HOME", "cat a.txt &", "cat <a.txt",
    "cat a.txt\nid", "cat a.txt\x00", "cat a\\ b", "cat *", "cat ?.txt", "cat {a,b}.txt", "cat 'a.txt", 'cat "a.txt"', "cat é",
    "sed -i 's/^a$/b/e' a.txt", "sed -i 's/^a$/b/w x' a.txt", "sed -i 's/^a$/b/;w x' a.txt", "sed -i '1e id' a.txt",
    "sed -n p a.txt", "sed -i -e 's/^a$/b/' a.txt", "sed -i 's/^a$/&&/' a.txt", "sed --help", "sed -i 's/^a$/b/' ../a.txt",
    "grep -r x .",
    "grep '' a.txt", "grep a^b a.txt", "grep 'a$b' a.txt", "grep -f /etc/passwd a.txt", "grep x /etc/passwd",
    "grep x a.txt /etc/passwd", "grep '\\(a\\)*' a.txt",
    "head -c 5 a.txt", "head -n -1 a.txt", "head -n 99999 a.txt", "ls -la", "ls ..", "ls /", "ls a.txt d", "rm a.txt",
    "python3 -c 1", "python3 -m http.server", "python3 a.txt", "sh -c id", "sh a.txt", "python3", "sh", "bash -c id", "curl x",
    "echo -e x > a.txt", "echo -n x > a.txt", "cat " + "a" * 5000, "cd d", "exec sh", "cat\ta.txt",
    "cat #x", "cat !1", "cat a.txt%0a",
]  # fmt: skip


@pytest.mark.parametrize("line", ESCAPES)
def test_escapes_are_answered_with_text(tmp_path, line):
    folder = tmp_path / "w"
    folder.mkdir()
    make(folder)
    before = tree(folder)
    output, code = Shell(folder, {}).run(line)
    assert code != 0
    assert "root:" not in output
    assert "uid=" not in output
    assert output.endswith("\n")
    assert tree(folder) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w"]
    assert Simulator(FILES, {}).run(line)[1] == code


def test_links_are_refused(tmp_path):
    folder = tmp_path / "w"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret\n")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    shell = Shell(folder, {"link": "secret\n"})
    for line in (
        "cat link",
        "head link",
        "grep s link",
        "echo x > link",
        "cat up/secret",
        "sed -i 's/^secret$/x/' link",
        "sh link",
    ):
        output, code = shell.run(line)
        assert code == 2, line
        assert "secret\n" not in output.replace("up/secret", ""), line
    assert (tmp_path / "secret").read_text() == "secret\n"


def test_only_unchanged_programs_run(tmp_path):
    once = Once("once.sh", ("abc 1234",))
    (tmp_path / "once.sh").write_text(once.source())
    (tmp_path / "mine.sh").write_text("echo stolen\n")
    shell = Shell(tmp_path, {"once.sh": once.source()})
    assert shell.run("sh mine.sh")[1] == 2
    assert shell.run("python3 once.sh")[1] == 2
    assert shell.run("echo id > once.sh") == ("", 0)
    assert shell.run("sh once.sh")[1] == 2
    (tmp_path / "once.sh").write_text(once.source())
    assert shell.run("sh once.sh") == ("abc 1234\n", 0)
    assert not (tmp_path / "once.sh").exists()
    assert shell.run("sh once.sh")[1] == 2


def test_a_module_of_the_agent_is_not_imported():
    with World(make_task(2, "repair")) as world:
        for name in ("zlib.py", "sys.py", "sitecustomize.py", "m.py"):
            world.bash(f"echo import nothing_such > {name}")
        assert "nothing_such" not in world.bash("python3 t.py")
        assert not world.verdict()


def test_long_output_is_cut(tmp_path):
    (tmp_path / "big.txt").write_text("x" * 99 + "\n" * 2 * CAP)
    output, code = Shell(tmp_path, {}).run("cat big.txt big.txt")
    assert code == 0
    assert len(output) < CAP + 100
    assert output.endswith("[output cut]\n")


def test_slow_programs_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("agentkv.world.shell.SECONDS", 0.3)
    (tmp_path / "slow.sh").write_text("sleep 30 & sleep 30\n")
    output, code = Shell(tmp_path, {"slow.sh": "sleep 30 & sleep 30\n"}).run("sh slow.sh")
    assert code == 124
    assert "stopped" in output


def test_children_inherit_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKV_SECRET", "1")
    (tmp_path / "env.sh").write_text("env\n")
    output, _ = Shell(tmp_path, {"env.sh": "env\n"}).run("sh env.sh")
    assert "AGENTKV_SECRET" not in output
    assert {line.split("=")[0] for line in output.split()} <= {"LC_ALL", "PATH", "PWD", "OLDPWD", "_", "SHLVL"}
