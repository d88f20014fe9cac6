/* Made by `make proto` from wire/envelopes/layout.py: where the fields of an envelope stand. */
#include <stdint.h>

#define TRACE_BYTES 25
#define PAYLOAD_TAG 0x4a
#define ROW_EXPONENTS_TAG 0x52
#define OPTIONS_TAG 0x5a
#define DRAFT_TOKENS_TAG 0x6a
#define CHECKSUM_TAG 0x71

#define HEADER_BYTES 70
#define HEADER_EPOCH_AT 1
#define HEADER_SEQUENCE_AT 6
#define HEADER_DTYPE_AT 15
#define HEADER_N_ROWS_AT 20
#define HEADER_WIDTH_AT 25
#define HEADER_SENT_NS_AT 30
#define HEADER_N_FRAMES_AT 39
#define HEADER_BATCH_TRACE_AT 45
static const struct {
    uint8_t at, byte;
} HEADER_CONSTANTS[] = {
    {0, 0x0d},
    {5, 0x11},
    {14, 0x1d},
    {19, 0x25},
    {24, 0x2d},
    {29, 0x31},
    {38, 0x3d},
    {43, 0x62},
    {44, 0x19},
};

#define FRAME_BYTES 85
#define FRAME_SESSION_ID_AT 3
#define FRAME_EPOCH_AT 12
#define FRAME_POSITION_AT 17
#define FRAME_N_ROWS_AT 22
#define FRAME_FLAGS_AT 27
#define FRAME_ARGUMENT_AT 32
#define FRAME_CHECKSUM_AT 41
#define FRAME_ENQUEUED_NS_AT 50
#define FRAME_TRACE_AT 60
static const struct {
    uint8_t at, byte;
} FRAME_CONSTANTS[] = {
    {0, 0x42},
    {1, 0x53},
    {2, 0x09},
    {11, 0x15},
    {16, 0x1d},
    {21, 0x25},
    {26, 0x2d},
    {31, 0x31},
    {40, 0x39},
    {49, 0x41},
    {58, 0x4a},
    {59, 0x19},
};
