"""The parser of a program's command line."""

import argparse


def parser_of(description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """With ``description``, a module's docstring, printed line by line; ``prog``: as it is run."""
    kept = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=kept)
