"""Arithmetic expressions in place of numbers: `"20 * params / (gbs * seq_length)"`.

An expression is parsed to Python's syntax tree. Only numbers, known names, and a few operators and functions are
accepted. The calculation uses exact fractions, so that rounding up is never wrong by one.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from megaboa.config.problems import nearest
from megaboa.layout import AXES

# Names in expressions and the keys they stand for; None: derived, see megaboa.plan.quantities.
NAMES: dict[str, str | None] = {
    "params": None,
    "dp": None,
    "world_size": None,
    "gbs": "training.global_batch_size",
    "mbs": "training.micro_batch_size",
    "seq_length": "training.seq_length",
    "train_iters": "training.train_iters",
    "train_tokens": "training.train_tokens",
    **{axis.name: axis.key for axis in AXES if axis.default},
    "lr": "optimizer.lr",
}

MAX_LENGTH = 500
MAX_BITS = 4096  # limit of every intermediate result, so that 9**9**9 doesn't hang

Number = int | float | Fraction


class FormulaError(ValueError):
    """Text that is no expression, or that can't be calculated."""


def _power(base: Number, exponent: Number) -> Number:
    if Fraction(exponent).denominator != 1:
        result = float(base) ** float(exponent)
        if isinstance(result, complex):
            raise FormulaError("a root of a negative number")
        return result
    base, times = Fraction(base), int(exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(times) * bits > MAX_BITS:
        raise FormulaError("a number gets too large")
    return base**times


_OPERATORS: dict[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: Fraction(a) / Fraction(b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "min": min,
    "max": max,
    "round": round,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "log": math.log,
}
LENGTHS = ("train_iters", "train_tokens")  # each is calculated from the other


def names_for(field: str | None) -> list[str]:
    """Names that the expression of a field can use: all but those that depend on the field itself."""
    own = {name for name, key in NAMES.items() if key and key.rpartition(".")[2] == field}
    own |= set(LENGTHS) if own & set(LENGTHS) else set()
    return [name for name in NAMES if name not in own]


@functools.lru_cache(maxsize=4096)
def parse(text: str, field: str | None = None) -> ast.expr:
    """The checked syntax tree of an expression. `field`: the last part of its key, for the message."""
    names = names_for(field)
    allowed = f"allowed: numbers, + - * / // % **, {', '.join(_FUNCTIONS)}, and the names {', '.join(names)}"
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FormulaError(f"is neither a number nor an expression; {allowed}") from None
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and not isinstance(tree.value, bool):
        raise FormulaError(f"is text: write {text.strip()} without quotes")
    if wrong := _wrong(tree, names):
        raise FormulaError(f"{wrong}; {allowed}")
    return tree


def _wrong(node: ast.expr, names: list[str]) -> str | None:
    """What an expression mustn't have; None if it may have all of its parts. `names`: those to suggest."""
    match node:
        case ast.Constant(value=bool()):
            return "is not a number"
        case ast.Constant(value=int() | float()):
            return None
        case ast.Name(id=name) if name in NAMES:
            return None
        case ast.Name(id=name):
            hint = nearest(name, names)
            return f"uses the unknown name {name!r}" + (f"; did you mean {hint!r}?" if hint else "")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            parts = [left, right]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            parts = [operand]
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in _FUNCTIONS:
            parts = args
        case _:
            return f"has a part that is not allowed: {ast.unparse(node)!r}"
    return next((wrong for part in parts if (wrong := _wrong(part, names))), None)


def evaluate(text: str, lookup: Callable[[str], Number]) -> Fraction:
    """The value of an expression; `lookup` gives the value of a name."""
    try:
        return exact(_evaluate(parse(text), lookup))
    except ZeroDivisionError:
        raise FormulaError("divides by zero") from None
    except (OverflowError, TypeError, ValueError) as error:
        if isinstance(error, FormulaError):
            raise
        raise FormulaError(f"can't be calculated: {error}") from None


def _evaluate(node: ast.expr, lookup: Callable[[str], Number]) -> Number:
    match node:
        case ast.Constant(value=value):
            result: Number = exact(value)
        case ast.Name(id=name):
            result = exact(lookup(name))
        case ast.BinOp(left=left, op=op, right=right):
            result = _OPERATORS[type(op)](_evaluate(left, lookup), _evaluate(right, lookup))
        case ast.UnaryOp(op=op, operand=operand):
            result = _OPERATORS[type(op)](_evaluate(operand, lookup))
        case ast.Call(func=ast.Name(id=name), args=args):
            values = [_evaluate(arg, lookup) for arg in args]
            if name == "round":
                values[1:] = [int(digits) for digits in values[1:]]
            result = _FUNCTIONS[name](*values)
    result = exact(result)
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
        raise FormulaError("a number gets too large")
    return result


def exact(value: Number) -> Fraction:
    """A float as the exact decimal number that was written: 0.1 is one tenth."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FormulaError("a number gets too large")
        return Fraction(repr(value))
    return Fraction(value)


class Formula:
    """Annotation of a numeric field: an expression may stand for the number until the run is planned."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        number = handler(schema)
        text = {
            "type": "string",
            "minLength": 1,
            "description": "an expression, such as 20 * params / (gbs * seq_length)",
        }
        return {"anyOf": [number, text]}

    @staticmethod
    def _validate(value: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if isinstance(value, str):
            parse(value, info.field_name or (info.context or {}).get("field"))  # without a name if it is in a sweep
            return value
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
            value = int(value)  # 1e9 tokens; a field of type float converts it back
        return handler(value)
