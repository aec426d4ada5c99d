// The JSON keys of ledgers and verdicts, each spelled once. docs/formats.md says what they mean.
#pragma once

namespace nanlocator::keys {

inline constexpr int kLedgerVersion = 1;
inline constexpr int kVerdictVersion = 2;
inline constexpr int kHistoryVersion = 1;

// A ledger's lines: the value of "record".
inline constexpr const char* kRecord = "record";
inline constexpr const char* kRecordLedger = "ledger";
inline constexpr const char* kRecordParameter = "parameter";
inline constexpr const char* kRecordCoverage = "coverage";
inline constexpr const char* kRecordSighting = "sighting";
inline constexpr const char* kRecordCrossings = "crossings";
inline constexpr const char* kRecordMicrobatch = "microbatch";
inline constexpr const char* kRecordOptimizerState = "optimizer_state";
inline constexpr const char* kRecordBirth = "birth";
inline constexpr const char* kRecordRerun = "rerun";
inline constexpr const char* kRecordHistory = "history";
inline constexpr const char* kRecordNote = "note";
inline constexpr const char* kRecordEnd = "end";

// A ledger's first line.
inline constexpr const char* kVersion = "version";
inline constexpr const char* kRun = "run";
inline constexpr const char* kAttempt = "attempt";
inline constexpr const char* kIteration = "iteration";
inline constexpr const char* kLevel = "level";
inline constexpr const char* kOnBad = "on_bad";
inline constexpr const char* kCoordinates = "coordinates";
inline constexpr const char* kBackwardOrder = "backward_order";
inline constexpr const char* kObserved = "observed";
inline constexpr const char* kReverseRegistration = "reverse_registration";
inline constexpr const char* kGradientNorm = "gradient_norm";
inline constexpr const char* kLossScale = "loss_scale";
inline constexpr const char* kAbsmax = "absmax";
inline constexpr const char* kAbsmaxParameter = "absmax_parameter";
inline constexpr const char* kWeightsFiniteAfter = "weights_finite_after";

// Parameters, coverage, notes, the end.
inline constexpr const char* kId = "id";
inline constexpr const char* kName = "name";
inline constexpr const char* kShape = "shape";
inline constexpr const char* kChunk = "chunk";
inline constexpr const char* kMayBeUntouched = "may_be_untouched";
inline constexpr const char* kIsTpDuplicate = "is_tp_duplicate";
inline constexpr const char* kIsTied = "is_tied";
inline constexpr const char* kShard = "shard";
inline constexpr const char* kPhase = "phase";
inline constexpr const char* kParameters = "parameters";
inline constexpr const char* kText = "text";
inline constexpr const char* kLines = "lines";
inline constexpr const char* kCrc32 = "crc32";

// Crossings between ranks, microbatches.
inline constexpr const char* kCrossing = "crossing";
inline constexpr const char* kGroup = "group";
inline constexpr const char* kMembers = "members";
inline constexpr const char* kPeer = "peer";
inline constexpr const char* kSequence = "sequence";
inline constexpr const char* kCount = "count";
inline constexpr const char* kNumber = "number";
inline constexpr const char* kTensors = "tensors";

// Histories: a rank's, and their summary in its ledger.
inline constexpr const char* kIterations = "iterations";
inline constexpr const char* kNorm = "norm";
inline constexpr const char* kNonfinite = "nonfinite";

// Sightings and an origin's tensor.
inline constexpr const char* kMicrobatch = "microbatch";
inline constexpr const char* kModule = "module";
inline constexpr const char* kOperator = "operator";
inline constexpr const char* kRole = "role";
inline constexpr const char* kParameterId = "parameter_id";
inline constexpr const char* kParameter = "parameter";
inline constexpr const char* kDtype = "dtype";
inline constexpr const char* kValidLabels = "valid_labels";
inline constexpr const char* kStats = "stats";
inline constexpr const char* kNumel = "numel";
inline constexpr const char* kNan = "nan";
inline constexpr const char* kPosInf = "pos_inf";
inline constexpr const char* kNegInf = "neg_inf";
inline constexpr const char* kZeros = "zeros";
inline constexpr const char* kFirstBad = "first_bad";
inline constexpr const char* kFirstBadIndex = "first_bad_index";
inline constexpr const char* kFiniteMin = "finite_min";
inline constexpr const char* kFiniteMax = "finite_max";
inline constexpr const char* kAbsmin = "absmin";
inline constexpr const char* kSumOfSquares = "sum_of_squares";
inline constexpr const char* kFingerprint = "fingerprint";
inline constexpr const char* kAbsmaxFinite = "absmax_finite";

// The verdict.
inline constexpr const char* kStatus = "status";
inline constexpr const char* kOrigins = "origins";
inline constexpr const char* kDirection = "direction";
inline constexpr const char* kCandidates = "candidates";
inline constexpr const char* kIsOnEveryCandidate = "is_on_every_candidate";
inline constexpr const char* kDataParallelReplica = "data_parallel_replica";
inline constexpr const char* kTensor = "tensor";
inline constexpr const char* kCause = "cause";
inline constexpr const char* kConfidence = "confidence";
inline constexpr const char* kEvidence = "evidence";
inline constexpr const char* kRefutedBy = "refuted_by";
inline constexpr const char* kAction = "action";
inline constexpr const char* kBundle = "bundle";
inline constexpr const char* kCleanBefore = "clean_before";
inline constexpr const char* kCleanAfter = "clean_after";
inline constexpr const char* kSpread = "spread";
inline constexpr const char* kRanks = "ranks";
inline constexpr const char* kFirstSeen = "first_seen";
inline constexpr const char* kClean = "clean";
inline constexpr const char* kRerun = "rerun";
inline constexpr const char* kDone = "done";
inline constexpr const char* kReproduced = "reproduced";
inline constexpr const char* kNotRestored = "not_restored";
inline constexpr const char* kControlReproduced = "control_reproduced";
inline constexpr const char* kGradients = "gradients";
inline constexpr const char* kChanged = "changed";
inline constexpr const char* kBadParameters = "bad_parameters";
inline constexpr const char* kSilentRanks = "silent_ranks";
inline constexpr const char* kNotes = "notes";

}  // namespace nanlocator::keys
