// Keys that only verdict.json has, since version 2; the others are in record/keys.hpp.
#pragma once

namespace nanlocator::keys {

inline constexpr const char* kTitle = "title";
inline constexpr const char* kDetail = "detail";
inline constexpr const char* kOwner = "owner";
inline constexpr const char* kPlaceConfidence = "place_confidence";
inline constexpr const char* kCauseConfidence = "cause_confidence";
inline constexpr const char* kAlternatives = "alternatives";
inline constexpr const char* kFacts = "facts";
inline constexpr const char* kSource = "source";
inline constexpr const char* kActionKind = "action_kind";
inline constexpr const char* kRefutation = "refutation";
inline constexpr const char* kJob = "job";
inline constexpr const char* kWeightsUpdated = "weights_updated";
inline constexpr const char* kLayout = "layout";
inline constexpr const char* kFirstRank = "first_rank";
inline constexpr const char* kRanksPerHost = "ranks_per_host";
inline constexpr const char* kMentioned = "mentioned";

}  // namespace nanlocator::keys
