"""Where the project's files are. An installed package has none of its own and uses those of the working folder."""

from __future__ import annotations

from pathlib import Path

from cluster.core.errors import UserError

# Folders that only a checkout of the project has.
CHECKOUT = ("inventories", "terraform", "roles")
ENVIRONMENTS = "inventories/*/group_vars/all/cluster.yml"


def find_root() -> Path:
    """The checkout that holds this package. An installed package takes the nearest folder that has environments, from
    the working folder upwards, or else the working folder itself."""
    package = Path(__file__).resolve().parents[2]
    if any(package.glob(ENVIRONMENTS)):
        return package
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if any(folder.glob(ENVIRONMENTS))), here)


ROOT = find_root()
# Without a checkout it is relative, so it follows a notebook that changes its working folder.
RESULTS = ROOT / "results" if any(ROOT.glob(ENVIRONMENTS)) else Path("results")


def require_checkout(folders: tuple[str, ...] = CHECKOUT) -> None:
    """Stop a command that needs these folders where there is no checkout."""
    if missing := [f"{name}/" for name in folders if not (ROOT / name).is_dir()]:
        where = f"{ROOT} has no {', '.join(missing)}"
        raise UserError(f"{where}; this command needs an environment: run it in a checkout of the project")
