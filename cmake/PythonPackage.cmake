# nanlocator_find_python_package(<package> <variable>): the folder of a package that ${Python3_EXECUTABLE} would import,
# found without importing it; empty if there is none.
function(nanlocator_find_python_package package variable)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util, os; s = importlib.util.find_spec('${package}'); print(os.path.dirname(s.origin) if s else '', end='')"
    OUTPUT_VARIABLE folder)
  set(${variable} ${folder} PARENT_SCOPE)
endfunction()
