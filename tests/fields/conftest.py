from fixtures import run_in_tmp_path, without_leftovers  # noqa: F401
