# Sourced by test.sh and quickstart.sh: makes .venv if it is missing, installs what is pinned, activates it.
if [ ! -x .venv/bin/python ]; then
    python3 -m venv .venv
fi
source .venv/bin/activate
# The pins were resolved on Python 3.11; newer Pythons take newer releases of the same packages.
pins=()
if python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    pins=(--constraint requirements.txt)
fi
pip install --quiet --disable-pip-version-check "${pins[@]}" --editable '.[test]'
