"""JSON schemas at random: nested objects, arrays, enums, bounded numbers, strings by length and by pattern, alternatives."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = (
    r"^[a-z]{2,6}$",
    r"^[A-Z][a-z]+( [A-Z][a-z]+)?$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^(red|green|blue)$",
    r"^[0-9a-f]{8}$",
    r"^v[0-9]+\.[0-9]+$",
    r"^[^\n]{1,12}$",
)
WORDS = ("id", "name", "größe", "tags", "a b", "x-y", "count", "on", "Ünïcode", "v", 'quo"te', "back\\slash")


class SchemaMaker:
    """One schema a call, the same for the same seed. Every text of it is finite, so that random draws come to an end."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def document(self) -> dict[str, Any]:
        """A schema of an object, an array or anything else."""
        kind = self.chance.choice((self.object, self.object, self.array, self.any))
        return kind(3)

    def any(self, depth: int) -> dict[str, Any]:
        leaves = (self.string, self.pattern, self.integer, self.number, self.enum, self.plain, self.const)
        deep = (self.object, self.array, self.either, self.nullable)
        return self.chance.choice(leaves + deep * 2 if depth > 0 else leaves)(depth)

    def object(self, depth: int) -> dict[str, Any]:
        names = self.chance.sample(WORDS, self.chance.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: self.any(depth - 1) for name in names},
            "required": [name for name in names if self.chance.random() < 0.6],
            "additionalProperties": False,
        }

    def array(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(0, 2)
        schema = {"type": "array", "minItems": low, "maxItems": low + self.chance.randint(0, 3), "items": self.any(depth - 1)}
        if self.chance.random() < 0.2:
            schema["prefixItems"] = [self.any(0) for _ in range(self.chance.randint(1, 2))]
        return schema

    def either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth - 1) for _ in range(self.chance.randint(2, 3))]}

    def nullable(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth - 1), {"type": "null"}]}

    def string(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(0, 5)
        return {"type": "string", "minLength": low, "maxLength": low + self.chance.randint(0, 20)}

    def pattern(self, depth: int) -> dict[str, Any]:
        return {"type": "string", "pattern": self.chance.choice(PATTERNS)}

    def integer(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(-1000, 1000)
        keys = {"minimum": low, "maximum": low + self.chance.randint(0, 500)}
        if self.chance.random() < 0.3:
            keys = {"exclusiveMinimum": low, "exclusiveMaximum": low + self.chance.randint(2, 90)}
        return {"type": "integer", **keys}

    def number(self, depth: int) -> dict[str, Any]:
        low = round(self.chance.uniform(-50, 50), 2)
        return {"type": "number", "minimum": low, "maximum": round(low + self.chance.uniform(0.5, 80), 2)}

    def enum(self, depth: int) -> dict[str, Any]:
        values = ["on", "off", "ä€", 'a "b"', 3, -1, 2.5, None, True, [1, 2], {"k": "v"}]
        return {"enum": self.chance.sample(values, self.chance.randint(1, 4))}

    def const(self, depth: int) -> dict[str, Any]:
        return {"const": self.chance.choice(["fixed", 7, False, None, {"a": [1]}])}

    def plain(self, depth: int) -> dict[str, Any]:
        return {"type": self.chance.choice(["boolean", "null", "integer", ["boolean", "null"]])}
