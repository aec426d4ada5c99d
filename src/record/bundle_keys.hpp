// The JSON keys of births and bundle.json, each spelled once. docs/formats.md says what they mean.
// What ledgers have too ("run", "coordinates", "dtype", ...) is in keys.hpp.
#pragma once

namespace nanlocator::keys {

inline constexpr int kBundleVersion = 1;

// A birth.
inline constexpr const char* kKind = "kind";
inline constexpr const char* kSighting = "sighting";
inline constexpr const char* kIsModuleInferred = "is_module_inferred";
inline constexpr const char* kNode = "node";
inline constexpr const char* kForwardOperator = "forward_operator";
inline constexpr const char* kParent = "parent";
inline constexpr const char* kIsCustomOperator = "is_custom_operator";
inline constexpr const char* kCustomFunction = "custom_function";
inline constexpr const char* kCode = "code";
inline constexpr const char* kFrameworkCode = "framework_code";
inline constexpr const char* kOperands = "operands";
inline constexpr const char* kExtent = "extent";
inline constexpr const char* kLiteralOperator = "literal_operator";
inline constexpr const char* kReader = "reader";
inline constexpr const char* kWriter = "writer";
inline constexpr const char* kLastSeen = "last_seen";
inline constexpr const char* kInside = "inside";
inline constexpr const char* kStack = "stack";
inline constexpr const char* kReached = "reached";
inline constexpr const char* kReplay = "replay";
inline constexpr const char* kReplayLines = "replay_lines";

// Its code lines, operands and extent.
inline constexpr const char* kFile = "file";
inline constexpr const char* kLine = "line";
inline constexpr const char* kFunction = "function";
inline constexpr const char* kElement = "element";
inline constexpr const char* kNegatives = "negatives";
inline constexpr const char* kIgnored = "ignored";
inline constexpr const char* kAtFirstBad = "at_first_bad";
inline constexpr const char* kDimensions = "dimensions";
inline constexpr const char* kIsBlock = "is_block";
inline constexpr const char* kFirst = "first";
inline constexpr const char* kLast = "last";

// A birth as it was written before it had operands.
inline constexpr const char* kOldValues = "values";

// bundle.json.
inline constexpr const char* kBirth = "birth";
inline constexpr const char* kOperatorCall = "operator_call";
inline constexpr const char* kModuleCall = "module_call";
inline constexpr const char* kSettings = "settings";
inline constexpr const char* kVersions = "versions";
inline constexpr const char* kCppStack = "cpp_stack";
inline constexpr const char* kStorages = "storages";
inline constexpr const char* kFiles = "files";

// The operator call.
inline constexpr const char* kSchema = "schema";
inline constexpr const char* kArguments = "arguments";
inline constexpr const char* kOutputs = "outputs";
inline constexpr const char* kGeneratorStates = "generator_states";

// The module call.
inline constexpr const char* kClass = "class";
inline constexpr const char* kIsTraining = "is_training";
inline constexpr const char* kKeywords = "keywords";
inline constexpr const char* kWeights = "weights";
inline constexpr const char* kGradOutputs = "grad_outputs";
inline constexpr const char* kGradInputs = "grad_inputs";
inline constexpr const char* kPickle = "pickle";
inline constexpr const char* kPickleProblem = "pickle_problem";

// Values that JSON has no word for: {"kind": ..., ...}.
inline constexpr const char* kKindUndefinedTensor = "undefined_tensor";
inline constexpr const char* kKindTensor = "tensor";
inline constexpr const char* kKindReal = "real";
inline constexpr const char* kKindComplex = "complex";
inline constexpr const char* kKindDevice = "device";
inline constexpr const char* kKindGenerator = "generator";
inline constexpr const char* kKindTuple = "tuple";
inline constexpr const char* kKindDictionary = "dictionary";
inline constexpr const char* kKindObject = "object";
inline constexpr const char* kKindUnsupported = "unsupported";
inline constexpr const char* kBits = "bits";
inline constexpr const char* kImaginaryBits = "imaginary_bits";
inline constexpr const char* kValue = "value";
inline constexpr const char* kNames = "names";
inline constexpr const char* kItems = "items";

// A tensor.
inline constexpr const char* kStorage = "storage";
inline constexpr const char* kSizes = "sizes";
inline constexpr const char* kStrides = "strides";
inline constexpr const char* kOffset = "offset";
inline constexpr const char* kDevice = "device";
inline constexpr const char* kFlags = "flags";

// tensors.safetensors: "__metadata__" holds the checksum of bundle.json under its name.
inline constexpr const char* kBundleFile = "bundle.json";
inline constexpr const char* kTensorsFile = "tensors.safetensors";

}  // namespace nanlocator::keys
