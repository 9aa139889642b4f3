"""The dialects against the shipped configuration files and the forms that the frameworks use."""

import json
from pathlib import Path

import pytest
import yaml
from jinja2 import StrictUndefined, Template

from agentkv.tools.registry import Toolbox
from agentkv.types import ToolCall
from agentkv.world.dialect import DIALECTS, MINI, NATIVE, OPENHANDS, Place, dialect
from agentkv.world.env import World
from agentkv.world.task import make_task

INTEGRATIONS = Path(__file__).resolve().parents[2] / "integrations"


def test_mini_swe_agent_is_its_configuration():
    config = yaml.safe_load((INTEGRATIONS / "minisweagent" / "micro.yaml").read_text())
    assert Template(config["agent"]["system_template"]).render() == MINI.system
    assert Template(config["agent"]["instance_template"]).render(task="Do {{it}}.") == MINI.prompt("Do {{it}}.")
    observation = Template(config["model"]["observation_template"], undefined=StrictUndefined)
    for output, code in (("a\nb\n", 0), ("", 0), ("no end", 1), ("cat: x: No such file or directory\n", 1)):
        assert observation.render(output={"output": output, "returncode": code}) == MINI.body(output, code)


def test_openhands_is_its_configuration():
    config = json.loads((INTEGRATIONS / "openhands" / "micro.json").read_text())
    assert config["agent"]["system_prompt"] == OPENHANDS.system
    schemas = {tool["function"]["name"]: tool["function"] for tool in OPENHANDS.tools}
    assert {name: tool["description"] for name, tool in config["tools"].items()} == {
        name: schema["description"] for name, schema in schemas.items()
    }
    for name, tool in config["tools"].items():
        assert tool["parameters"] == list(schemas[name]["parameters"]["properties"])


def test_forms():
    place = Place("/w/x", "/usr/bin/python")
    assert NATIVE.body("a\n", 0, place) == "a"
    assert OPENHANDS.body("a\n", 1, place) == (
        "a\n[Current working directory: /w/x]\n[Python interpreter: /usr/bin/python]\n[Command finished with exit code 1]"
    )
    assert OPENHANDS.call("cat a.txt")["function"]["arguments"] == {
        "command": "cat a.txt", "summary": "cat", "security_risk": "LOW",
    }  # fmt: skip
    with pytest.raises(ValueError, match="unknown dialect"):
        dialect("x")


@pytest.mark.parametrize("name", list(DIALECTS))
def test_the_world_runs_the_calls_of_its_dialect(name):
    spoken = DIALECTS[name]
    with World(make_task(1, dialect=spoken), spoken) as world:
        tools = Toolbox(world.tools)
        assert tools.schemas == list(spoken.tools)
        made = spoken.call("echo hi")["function"]
        call = ToolCall(id="c", name=made["name"], arguments=made["arguments"])
        assert tools.call(call) == spoken.body("hi\n", 0, world.place)
        finish = spoken.finish()
        if finish is not None:
            made = finish[0]["function"]
            assert tools.call(ToolCall(id="d", name=made["name"], arguments=made["arguments"])) == finish[1]
