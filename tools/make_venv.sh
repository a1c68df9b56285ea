# Sourced by test.sh and quickstart.sh, with the extras to install: makes .venv if it is missing, installs what is
# pinned, activates it. `source tools/make_venv.sh test`, or `source tools/make_venv.sh ''` for none. (Without an
# argument a sourced file would see its caller's.)
extras=${1:+[$1]}
if [ ! -x .venv/bin/pip ]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $(python3 --version 2>&1) is too old: draftmesh needs Python 3.11 or newer as python3" >&2
        exit 2
    }
    echo "making .venv and installing what is pinned; this is done once and takes some minutes" >&2
    python3 -m venv .venv
fi
source .venv/bin/activate
# The pins were resolved on Python 3.11; newer Pythons take newer releases of the same packages.
pins=()
if python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    pins=(--constraint requirements.txt)
fi
pip install --quiet --disable-pip-version-check "${pins[@]}" --editable ".$extras"
